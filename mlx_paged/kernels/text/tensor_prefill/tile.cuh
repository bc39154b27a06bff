// CUDA only: causal attention of the new tokens of several sequences, of any lengths, over block tables. 16-bit types on the
// tensor cores (mma.sync m16n8k16, float accumulators).
// A thread group takes one KV head and one tile: up to M / G new tokens of one sequence, times the G query heads of the KV head.
// Row n of its M rows is head n % G of token n / G. A warp has RT times 16 rows. Scores, probabilities and outputs stay in its
// registers; keys and values come through shared memory, KEYS tokens at a time:
//   scores  S[row, token] = Q[row, dim] K^T[dim, token]
//   output  O[row, dim]  += P[row, token] V[token, dim]    the accumulators of S are, in pairs, the A fragments of P
// Tiles start at a sequence's first new token and keys at multiples of KEYS, so a row's bits do not depend on the pack.
// Probabilities are rounded to T: over the hundreds of tokens that a new token sees, what that loses averages out.
constexpr int M = 16 * RT * SG;
constexpr int THREADS = 32 * SG;
constexpr int KW = D + 8;   // a row of keys in shared memory: padded, so that eight rows lie in different banks
constexpr int VW = DV + 8;
constexpr int STAGE = KEYS * (KW + VW);
constexpr int BLOCKS = KEYS > BS ? KEYS / BS : 1;  // that KEYS tokens lie in
constexpr float NOTHING = -1.0e30f;
constexpr float LOG2E = 1.44269504088896341f;

SHARED_ARRAY(T, shared, STAGE * BUFFERS + (QS ? M * KW : 0));
T* const queries = shared + STAGE * BUFFERS;

const int n_kv = k_pool_shape[1];
const int unit = threadgroup_position_in_grid.x;
// Where a tile's heads come first, they are those of one token, which lie next to each other; where a head's tiles do, they
// read the same keys at the same time.
const int n_tiles = tiles_shape[0];
const int kv_head = TILES_FIRST ? unit / n_tiles : unit % n_kv;
const int* tile = tiles + (TILES_FIRST ? unit % n_tiles : unit / n_kv) * 4;
const int first_row = tile[1];  // of the tile's tokens, in the pack
const int origin = tile[2];     // position of the first
const int n_tokens = tile[3];
const int thread_index = thread_position_in_threadgroup.x;
const int lane = thread_index_in_simdgroup;
const int warp = simdgroup_index_in_threadgroup;
const int r = lane / 4;
const int c = lane % 4;
const int first_line = warp * (RT * 16) + r;  // rows of a lane are this, and 8 more each
const int window = static_cast<int>(params[2]);
const int stride = static_cast<int>(params[3]);
// What a token sees: at most so many tokens, itself included, from a multiple of the stride on.
auto first_seen = [=](int position) {
  return (metal::max(position - window + 1, 0) + stride - 1) / stride * stride;
};
const int lo = first_seen(origin);
const int hi = origin + n_tokens;
const int first = lo / KEYS;
const int last = (hi - 1) / KEYS;
const float gain = SOFTCAP ? 1.0f : params[0] * LOG2E;
const int* table = tables + static_cast<int64_t>(tile[0]) * tables_shape[1];
