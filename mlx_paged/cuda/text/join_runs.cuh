#if JOIN
// CUDA only: join_partitions joins the partitions that shared kernels store for a line (row and query head), as
// paged_decode_tensor joins its runs. Grid: x = line; a thread handles four values. The head's sink is added at the
// end.
constexpr int AT_ONCE = 8;
constexpr float NOTHING = -3.0e38f;
constexpr float LOG2E = 1.44269504088896341f;
const int n_heads = partial_shape[0] / ends_shape[0];
const int line = blockIdx.x;
const int row = line / n_heads;
constexpr int run_shift = 0;
#include "row_partitions.cuh"
#else
// CUDA only, the end of the decode kernels for tensor cores of a single row.
#endif
// Join a head's runs into `whole` and `o`, for four values of the output. Four partitions form a tree, in which a run
// stands for its partitions; trees are joined one after another. The next run's outputs are `stride` float4 further, its
// maximum and sum pair_stride pairs further. The initial `whole` and `o` have no weight. AT_ONCE runs are loaded at a
// time.
auto join_runs = [&](const float4* parts, const float2* pairs, int stride, int pair_stride, State& whole, float4& o) {
  const int n = (n_live + (1 << run_shift) - 1) >> run_shift;
  for (int p = 0; p < n; p += AT_ONCE) {
    State leaf[AT_ONCE];
    float4 leaf_o[AT_ONCE];
    UNROLL
    for (int i = 0; i < AT_ONCE; i++) {
      if (p + i < n) {
        const float2 pair = load_relaxed(pairs + static_cast<int64_t>(p + i) * pair_stride);
        leaf[i] = {pair.x, pair.y};
        leaf_o[i] = load_relaxed(parts + static_cast<int64_t>(p + i) * stride);
      }
    }
    // Only the joins of one tree after another depend on each other. Without branches, the other joins overlap.
    auto join_trees = [&](auto shift) {
      constexpr int SHIFT = decltype(shift)::value, TREE = 4 >> SHIFT;
      UNROLL
      for (int width = 1; width < TREE; width *= 2) {
        UNROLL
        for (int i = 0; i < AT_ONCE; i += 2 * width) join_if(p + i + width < n, leaf[i], leaf_o[i], leaf[i + width], leaf_o[i + width]);
      }
      UNROLL
      for (int i = 0; i < AT_ONCE; i += TREE) join_if(p + i < n, whole, o, leaf[i], leaf_o[i]);
    };
    if (run_shift == 0) join_trees(Number<0>());
    if (run_shift == 1) join_trees(Number<1>());
    if (run_shift == 2) join_trees(Number<2>());
  }
};
#if JOIN
if (threadIdx.x < DV / 4) {
  State whole = {NOTHING, 1.0f};  // a row that sees no token gets zeros
  float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int64_t slot = static_cast<int64_t>(line) * stats_shape[1];
  join_runs(reinterpret_cast<const float4*>(partial) + slot * (DV / 4) + threadIdx.x, reinterpret_cast<const float2*>(stats) + slot, DV / 4, 1, whole, o);
  if (SINKS) join({static_cast<float>(sinks[line % n_heads]) * LOG2E, 1.0f}, make_float4(0.0f, 0.0f, 0.0f, 0.0f), whole, o);
  store_four(out + static_cast<int64_t>(line) * DV + threadIdx.x * 4, o.x / whole.l, o.y / whole.l, o.z / whole.l, o.w / whole.l);
}
#else
// The last thread group of a row and KV head to finish joins its runs. A row that sees no token gets zeros.
if (first <= last && n_live > 1 << run_shift) {
  __syncthreads();
  if (threadIdx.x == 0) tg_last = arrive(const_cast<unsigned*>(arrivals) + unit, (n_live - 1 >> run_shift) + 1);
  __syncthreads();
  for (int item = threadIdx.x; tg_last && item < G * DV / 4; item += SG * 32) {
    const int head = item / (DV / 4), at = item % (DV / 4);
    const int64_t slot = unit * n_runs * G + head;
    State whole = {NOTHING, 0.0f};
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    join_runs(reinterpret_cast<const float4*>(partial) + slot * (DV / 4) + at, stats + slot, G * DV / 4, G, whole, o);
    finish(head, at, whole, o);
  }
}
if (n_live == 0 && run == 0) {
  for (int item = threadIdx.x; item < G * DV; item += SG * 32) {
    out[line_of(item / DV) * DV + item % DV] = static_cast<T>(0.0f);
  }
}
#endif
