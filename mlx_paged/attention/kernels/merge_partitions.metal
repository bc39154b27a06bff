// Join the partitions of one line (sequence, query head, query position); the head's sink enters the denominator here.
// Grid: x = line, SG simdgroups. Only partitions that hold visible tokens are read.
constexpr float NOTHING = -3.0e38f;
constexpr float LOG2E = 1.44269504088896341f;

const int n_partitions = stats_shape[1];
const int q_len = ends_shape[1];
const int line = static_cast<int>(threadgroup_position_in_grid.x);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int sg = static_cast<int>(simdgroup_index_in_threadgroup);
const int row = line / (HEADS * q_len) * q_len + line % q_len;
const int start = metal::max(static_cast<int>(starts[row]), 0);
const int end = static_cast<int>(ends[row]);
const int first = start / PART;
const int last = start < end ? (end - 1) / PART : first - 1;
const int64_t base = static_cast<int64_t>(line) * n_partitions;

float top = NOTHING;
for (int p = first + lane; p <= last; p += 32) {
  top = metal::max(top, stats[(base + p) * 2]);
}
top = simd_max(top);
float denominator = 0.0f;
if (SINKS) {
  const float sink = static_cast<float>(sinks[line / q_len % HEADS]) * LOG2E;
  top = metal::max(top, sink);
  denominator = lane == 0 ? metal::exp2(sink - top) : 0.0f;
}
for (int p = first + lane; p <= last; p += 32) {
  denominator = metal::fma(stats[(base + p) * 2 + 1], metal::exp2(stats[(base + p) * 2] - top), denominator);
}
denominator = simd_sum(denominator);

for (int dim = sg * 32 + lane; dim < DV; dim += SG * 32) {
  float o = 0.0f;
  for (int p = first; p <= last; p++) {
    o = metal::fma(partial[(base + p) * DV + dim], metal::exp2(stats[(base + p) * 2] - top), o);
  }
  out[static_cast<int64_t>(line) * DV + dim] = static_cast<T>(start < end ? o / denominator : 0.0f);
}
