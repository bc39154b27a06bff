// Metal only: causal attention of the new tokens of several sequences, of any lengths, over block tables, by 8 x 8 matrices.
// A thread group takes one KV head and one tile: up to 8 * SG / G new tokens of one sequence, times the G query heads of the
// KV head. Row n of the tile is head n % G of token n / G. A simdgroup takes 8 rows. How lanes hold a matrix is not
// specified, so scores pass through threadgroup memory, and sums are rescaled by a diagonal matrix.
// Tiles start at a sequence's first new token and keys at multiples of KEYS, so a row's bits do not depend on the pack.
typedef simdgroup_matrix<T, 8, 8> Matrix;
typedef simdgroup_matrix<float, 8, 8> Sums;
constexpr int RT = 1;            // times 8 rows that a simdgroup takes
constexpr int SHARE = KEYS / 4;  // scores of a row that a lane takes
constexpr float NOTHING = -1.0e30f;
constexpr float LOG2E = 1.44269504088896341f;
threadgroup T queries[8 * SG * D];
threadgroup float scores[8 * SG * KEYS];
threadgroup T weights[8 * SG * KEYS];
threadgroup float diagonals[64 * SG];

const int n_kv = k_pool_shape[1];
const int unit = static_cast<int>(threadgroup_position_in_grid.x);
const int lane = static_cast<int>(thread_index_in_simdgroup);
const int sg = static_cast<int>(simdgroup_index_in_threadgroup);
const int kv_head = unit % n_kv;
const auto tile = tiles + unit / n_kv * 4;
const auto table = tables + static_cast<int64_t>(tile[0]) * tables_shape[1];
const int first_row = tile[1];  // of the tile's tokens, in the pack
const int origin = tile[2];     // position of the first
const int n_tokens = tile[3];
const int first_line = sg * 8;
if (unit + sg + lane == 0) {
  fence_out[0] = fence[0] + 1u;
}
if (n_tokens == 0 || (!TOGETHER && first_line >= n_tokens * G)) return;

threadgroup T* const own_queries = queries + first_line * D;
threadgroup float* const own_scores = scores + first_line * KEYS;
threadgroup T* const own_weights = weights + first_line * KEYS;
threadgroup float* const diagonal = diagonals + sg * 64;
const int row = lane / 4;
const int part = lane % 4;
const int window = static_cast<int>(params[2]);
const int stride = static_cast<int>(params[3]);
// What a token sees: at most `window` tokens, itself included, from a multiple of the stride on.
const int own = origin + metal::min((first_line + row) / G, n_tokens - 1);
const int from = (metal::max(own - window + 1, 0) + stride - 1) / stride * stride;
// What the rows of this simdgroup see, or of all if they wait for each other.
const int low = TOGETHER ? origin : origin + first_line / G;
const int lo = (metal::max(low - window + 1, 0) + stride - 1) / stride * stride;
const int hi = origin + (TOGETHER ? n_tokens : metal::min((first_line + 7) / G, n_tokens - 1) + 1);
const float gain = SOFTCAP ? 1.0f : params[0] * LOG2E;
const int64_t line = (static_cast<int64_t>(first_row + own - origin) * n_kv + kv_head) * G + (first_line + row) % G;

for (int i = part * 4; i < D; i += 16) {
  const Packet<T, 4> packet = load_packet<T, 4>(q + line * D + i);
  UNROLL
  for (int j = 0; j < 4; j++) {
    own_queries[row * D + i + j] = packet.part[0][j];
  }
}
diagonal[lane * 2] = 0.0f;
diagonal[lane * 2 + 1] = 0.0f;
simdgroup_barrier(mem_flags::mem_threadgroup);

float m[RT] = {NOTHING}, l[RT] = {0.0f};  // of the lane's row; the sum is of the lane's scores
Sums acc[DV / 8];
UNROLL
for (int v = 0; v < DV / 8; v++) {
  acc[v] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

for (int step = lo / KEYS; step <= (hi - 1) / KEYS; step++) {
