// Join the partitions of one line (sequence, query head, query position). The head's attention sink is added to the
// denominator here.
// Grid: x = line, SG simdgroups. Only partitions with visible tokens are read.
constexpr float NOTHING = -3.0e38f;

const int n_partitions = stats_shape[1];
const int q_len = ends_shape[1];
const int line = static_cast<int>(threadgroup_position_in_grid.x);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int sg = static_cast<int>(simdgroup_index_in_threadgroup);
const int heads = partial_shape[1];
const int row = line / (heads * q_len) * q_len + line % q_len;
const int begin = metal::max(static_cast<int>(starts[row]), 0);
const int n_live = partitions_of<PART, SPAN, FIRST>(begin, static_cast<int>(ends[row])).count;
const int64_t base = static_cast<int64_t>(line) * n_partitions;

constexpr int ND = (DV + SG * 32 - 1) / (SG * 32);   // dims per thread
constexpr int AHEAD = 8;                             // partitions in flight

// Load the first partial outputs before their weights are known.
float ahead[AHEAD * ND];
UNROLL
for (int i = 0; i < AHEAD * ND; i++) {
  const int dim = i % ND * SG * 32 + sg * 32 + lane;
  ahead[i] = i / ND < n_live && dim < DV ? partial[(base + i / ND) * DV + dim] : 0.0f;
}

// Lane p holds the stats of partition p of the first 32; those of the rest are read again below.
const float first_m = lane < n_live ? stats[(base + lane) * 2] : NOTHING;
const float first_l = lane < n_live ? stats[(base + lane) * 2 + 1] : 0.0f;
float top = first_m;
for (int p = lane + 32; p < n_live; p += 32) {
  top = metal::max(top, stats[(base + p) * 2]);
}
top = simd_max(top);
float denominator = 0.0f;
if (SINKS) {
  const float sink = static_cast<float>(sinks[line / q_len % heads]) * LOG2E;
  top = metal::max(top, sink);
  denominator = lane == 0 ? metal::fast::exp2(sink - top) : 0.0f;
}

float o[ND];
UNROLL
for (int d = 0; d < ND; d++) {
  o[d] = 0.0f;
}
for (int p0 = 0; p0 < n_live; p0 += 32) {
  float weight = 0.0f;
  if (p0 + lane < n_live) {
    weight = metal::fast::exp2((p0 == 0 ? first_m : stats[(base + p0 + lane) * 2]) - top);
    denominator = metal::fma(p0 == 0 ? first_l : stats[(base + p0 + lane) * 2 + 1], weight, denominator);
  }
  for (int j = 0; j < 32 && p0 + j < n_live; j += AHEAD) {
    UNROLL
    for (int i = 0; i < AHEAD; i++) {
      const float w = simd_shuffle(weight, static_cast<ushort>(j + i));
      UNROLL
      for (int d = 0; d < ND; d++) {
        o[d] = metal::fma(ahead[i * ND + d], w, o[d]);
      }
    }
    UNROLL
    for (int i = 0; i < AHEAD * ND; i++) {
      const int p = p0 + j + AHEAD + i / ND;
      const int dim = i % ND * SG * 32 + sg * 32 + lane;
      ahead[i] = p < n_live && dim < DV ? partial[(base + p) * DV + dim] : 0.0f;
    }
  }
}
denominator = simd_sum(denominator);
UNROLL
for (int d = 0; d < ND; d++) {
  const int dim = d * SG * 32 + sg * 32 + lane;
  if (dim < DV) {
    out[static_cast<int64_t>(line) * DV + dim] = static_cast<T>(n_live > 0 ? o[d] / denominator : 0.0f);
  }
}
