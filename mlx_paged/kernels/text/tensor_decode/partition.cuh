// Of the decode texts for tensor cores: which tokens the thread group of a row, kv head and run takes, and what it shares.
constexpr int CHUNK = 16 * U;
constexpr float NOTHING = -3.0e38f;
constexpr float LOG2E = 1.44269504088896341f;

__shared__ float tg_m[SG * NT * 8];
__shared__ float tg_l[SG * NT * 8];
// Outputs are kept with dim 8 a + b at b * DV / 8 + a, which spreads the stores below over all banks.
__shared__ __align__(16) float tg_o[SG * HR][DV + 4];
// A first half that waits for its second: [0] a partition, [1] a pair of partitions.
__shared__ State wait[2][G];
__shared__ float4 wait_o[2][G][DV / 4];
__shared__ bool tg_last;

const int n_kv = k_pool_shape[1];
const int max_blocks = tables_shape[1];
const int q_len = ends_shape[1];
const int kv_head = blockIdx.x;
const int row = blockIdx.y;
const int run = blockIdx.z;
const int n_runs = gridDim.z;
const int run_shift = static_cast<int>(params[3]);
const int lane = threadIdx.x % 32;
const int warp = threadIdx.x / 32;
const int r = lane / 4;
const int c = lane % 4;
const int sequence = row / q_len;
const int64_t line0 = static_cast<int64_t>(sequence * n_kv + kv_head) * G * q_len + row % q_len;
// Partitions grow with what the row itself sees, so they never depend on the rest of the batch.
const int begin = metal::max(static_cast<int>(starts[row]), 0);
const int end = static_cast<int>(ends[row]);
int doublings = 0;
while (end - begin > (SPAN * PART) << 2 * doublings) doublings++;
const int size = PART << doublings;
const int origin = begin / 64 * 64;
const int n_live = begin < end ? (end - origin + size - 1) / PART >> doublings : 0;
const int first = run << run_shift;
const int last = metal::min(first + (1 << run_shift), n_live) - 1;
const int lo = metal::max(begin, origin + first * size);
const int hi = metal::min(end, origin + (last + 1) * size);
const int64_t unit = static_cast<int64_t>(row) * n_kv + kv_head;
// With params[2] set (q_len is 1 then), the row's newest token comes with the call and is stored into its slot first.
const int fresh = params[2] != 0.0f ? end - 1 : -1;
float2* stats = reinterpret_cast<float2*>(partial + static_cast<int64_t>(gridDim.y) * n_kv * n_runs * (G * DV));

if (kv_head + row + run + lane + warp == 0) {
  fence_out[0] = fence[0] + 1u;
}
