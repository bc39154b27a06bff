// CUDA only, included by the decode kernels for tensor cores after the constants of their products: NT tiles of 8
// columns, HEADS columns with a head. The rows and partitions of a thread group, and what ends a run.
#if OWN
constexpr int WAITS = 2;  // first halves of a tree of joins that may wait
#else
constexpr int WAITS = 1;
#endif
constexpr int CHUNK = 16 * U;
constexpr int AT_ONCE = DV <= 64 || GROUPS > 3 ? 8 : 16;  // runs; more do not fit the registers of four groups
constexpr float NOTHING = -3.0e38f;
constexpr float LOG2E = 1.44269504088896341f;

__shared__ float tg_m[SG * NT * 8];
__shared__ float tg_l[SG * NT * 8];
__shared__ __align__(16) float tg_o[SG * HR][DV + 4];
// First halves that wait for their second: [0] a partition, [1] a pair of partitions.
__shared__ State wait[WAITS][HEADS];
__shared__ float4 wait_o[WAITS][HEADS][DV / 4];
__shared__ bool tg_last;

const int n_kv = k_pool_shape[1];
const int max_blocks = tables_shape[1];
const int q_len = ends_shape[1];
const int kv_head = blockIdx.x;
const int lane = threadIdx.x % 32;
const int warp = uniform(threadIdx.x / 32);
const int r = lane / 4;
const int c = lane % 4;
#if OWN
const int row = blockIdx.y;
const int run = blockIdx.z;
const int n_runs = gridDim.z;
const int run_shift = static_cast<int>(params[3]);
constexpr int n_rows = 1;
const int sequence = row / q_len;
const int64_t line0 = static_cast<int64_t>(sequence * n_kv + kv_head) * G * q_len + row % q_len;
auto line_of = [&](int column) { return line0 + column * q_len; };
#elif COMMON
const int* own_item = items + blockIdx.y * (2 + ROWS);
const int run = own_item[0];
const int n_runs = static_cast<int>(params[4]);
constexpr int run_shift = 0;
const int n_rows = own_item[1];
const int row = own_item[2];
if (n_rows == 0) return;
const int sequence = row;
auto line_of = [&](int column) { return (static_cast<int64_t>(own_item[2 + column / G]) * n_kv + kv_head) * G + column % G; };
#endif
#include "row_partitions.cuh"
const int first = run << run_shift;
const int last = metal::min(first + (1 << run_shift), n_live) - 1;
const int lo = metal::max(begin, origin + first * size);
const int hi = metal::min(end, origin + (last + 1) * size);
const int64_t unit = static_cast<int64_t>(row) * n_kv + kv_head;
const int first_head = kv_head * G;
const int heads = HEADS == G ? G : n_rows * G;  // columns with a head
// If params[2] is set (only with q_len 1), k_new and v_new hold the row's newest token, which is first stored in its
// slot.
const int fresh = params[2] != 0.0f ? end - 1 : -1;

if (kv_head + blockIdx.y + blockIdx.z + lane + warp == 0) {
  fence_out[0] = fence[0] + 1u;
}
#if OWN
// Kernels for a single row: add the head's sink and store four outputs.
auto finish = [&](int head, int at, State whole, float4 o) {
  if (SINKS) join({static_cast<float>(sinks[first_head + head]) * LOG2E, 1.0f}, make_float4(0.0f, 0.0f, 0.0f, 0.0f), whole, o);
  const float values[4] = {o.x, o.y, o.z, o.w};
  UNROLL
  for (int i = 0; i < 4; i++) out[line_of(head) * DV + dim_of(at * 4 + i)] = static_cast<T>(values[i] / whole.l);
};
// Kernels for a single row: store the result of a run, as the outputs if the row has no other.
float2* stats = reinterpret_cast<float2*>(partial + static_cast<int64_t>(ends_shape[0] * q_len) * n_kv * n_runs * (G * DV));
auto end_run = [&](int head, int at, State whole, float4 o) {
  if (n_live <= 1 << run_shift) {
    finish(head, at, whole, o);
  } else {
    const int64_t slot = (unit * n_runs + run) * G + head;
    reinterpret_cast<float4*>(partial)[slot * (DV / 4) + at] = o;
    if (at == 0) stats[slot] = make_float2(whole.m, whole.l);
  }
};
#elif COMMON
// Kernels for common blocks: store the result of a partition, with its dims in order.
auto slot_of = [&](int column) { return line_of(column) * n_runs + run; };
auto end_run = [&](int column, int at, State whole, float4 o) {
  const float values[4] = {o.x, o.y, o.z, o.w};
  UNROLL
  for (int i = 0; i < 4; i++) partial[slot_of(column) * DV + dim_of(at * 4 + i)] = values[i];
  if (at == 0) reinterpret_cast<float2*>(stats)[slot_of(column)] = make_float2(whole.m, whole.l);
};
#endif
// Store the maxima m and sums l of a warp's tokens for the other warps.
auto store_sums = [&](const float (&m)[NT][2], float (&l)[NT][2]) {
  UNROLL
  for (int n = 0; n < NT; n++) {
    UNROLL
    for (int i = 0; i < 2; i++) {
      l[n][i] += __shfl_xor_sync(0xffffffffu, l[n][i], 4);
      l[n][i] += __shfl_xor_sync(0xffffffffu, l[n][i], 8);
      l[n][i] += __shfl_xor_sync(0xffffffffu, l[n][i], 16);
      if (r == 0) {
        tg_m[warp * NT * 8 + n * 8 + c * 2 + i] = m[n][i];
        tg_l[warp * NT * 8 + n * 8 + c * 2 + i] = l[n][i];
      }
    }
  }
};
