// CUDA only: decode attention on the tensor cores (mma.sync m16n8k16, float accumulators), for queries of 16 bits.
//   paged_decode_tensor (OWN, PAGED), quantized_decode_tensor (OWN, QUANTIZED): each row by itself
//   shared_decode_tensor (COMMON, PAGED), shared_quantized_decode_tensor (COMMON, QUANTIZED): rows with common blocks
//   join_partitions (JOIN): joins what the COMMON kernels store

// Functions --------------------------------------------------------------------------------------------------------

// Largest score (base 2) and sum of weights of some tokens.
struct State {
  float m, l;
};
// Join an earlier state and output with a later one, into the later one.
__device__ inline void join(State a, float4 a_o, State& b, float4& b_o) {
  const float m = ::fmaxf(a.m, b.m);
  const float wa = power_of(a.m - m);
  const float wb = power_of(b.m - m);
  b = {m, ::fmaf(b.l, wb, a.l * wa)};
  b_o = make_float4(::fmaf(b_o.x, wb, a_o.x * wa), ::fmaf(b_o.y, wb, a_o.y * wa), ::fmaf(b_o.z, wb, a_o.z * wa), ::fmaf(b_o.w, wb, a_o.w * wa));
}
// Join them into the earlier one, if there is a later one.
__device__ inline void join_if(bool is_there, State& a, float4& a_o, State b, float4 b_o) {
  join(a, a_o, b, b_o);
  if (is_there) a = b, a_o = b_o;
}
// The partitions of a row that sees the tokens from `begin` to `end` - 1: their size, where the first one begins, and how
// many there are. The size depends only on how many tokens the row sees, never on the rest of the batch.
struct Partitions {
  int size, origin, count;
};
template <int PART, int SPAN>
__device__ inline Partitions partitions_of(int begin, int end) {
  int doublings = 0;
  while (end - begin > (SPAN * PART) << 2 * doublings) doublings++;
  const int size = PART << doublings, origin = begin / 64 * 64;
  return {size, origin, begin < end ? (end - origin + size - 1) / PART >> doublings : 0};
}
// Join a head's runs of 2^run_shift partitions into `whole` and `o`, for four values of the output. Four partitions form
// a tree, in which a run stands for its partitions; trees are joined one after another. The next run's outputs are
// `stride` float4 further, its maximum and sum pair_stride pairs further. The initial `whole` and `o` have no weight.
// AT_ONCE runs are loaded at a time.
template <int AT_ONCE>
__device__ inline void join_runs(int n_partitions, int run_shift, const float4* parts, const float2* pairs, int stride, int pair_stride, State& whole, float4& o) {
  const int n = (n_partitions + (1 << run_shift) - 1) >> run_shift;
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
}
#if QUANTIZED
// Codes of quantised keys and values as factors for the tensor cores.
// A code becomes the low bits of a float16 without a shift: with the exponent of 1024 bit 0 counts 1, with that of 64
// bit 4 does. So a factor is the code plus an offset of 1024 or 64. The sums are corrected by the offset times the sum
// of the other factors.
using Half = __half;
constexpr unsigned ONES = 0x64006400u, SIXTEENTHS = 0x54005400u;
constexpr float OFFSET = 1024.0f;
// Kinds of pairs, by their offset: two at 4 bits, one at 8 bits.
template <int BITS>
constexpr int KINDS = BITS == 4 ? 2 : 1;
template <int BITS>
__device__ inline float offset_of(int kind) {
  return BITS == 4 && kind == 1 ? 64.0f : OFFSET;
}
// Make four pairs of eight consecutive codes, in one or two words: 0 1, 2 3, 4 5, 6 7 at 8 bits, and 0 4, 1 5, 2 6, 3 7
// at 4 bits. Pairs 1 and 3 are of the second kind.
template <int BITS>
__device__ inline void code_pairs(const unsigned* words, unsigned (&pairs)[4]) {
  if constexpr (BITS == 8) {
    for (int i = 0; i < 4; i++) pairs[i] = __byte_perm(words[i / 2], ONES, i % 2 ? 0x7372 : 0x7170);
  } else {
    const unsigned later = words[0] >> 8;
    pairs[0] = select_bits(words[0], 0x000f000fu, ONES);
    pairs[1] = select_bits(words[0], 0x00f000f0u, SIXTEENTHS);
    pairs[2] = select_bits(later, 0x000f000fu, ONES);
    pairs[3] = select_bits(later, 0x00f000f0u, SIXTEENTHS);
  }
}
// Return which of eight values is the first or the second of pair i.
template <int BITS>
__device__ inline constexpr int pair_member(int i, int second) {
  return BITS == 8 ? i * 2 + second : i + second * 4;
}
// Make pairs of four consecutive codes of two tokens, one code of each per pair. The codes are a word at 8 bits, and a
// half (0 or 1) of a word at 4 bits. Pairs 1 and 3 are of the second kind.
template <int BITS>
__device__ inline void token_pairs(unsigned first, unsigned second, int half, unsigned (&pairs)[4]) {
  if constexpr (BITS == 8) {
    const unsigned low = __byte_perm(first, second, 0x5140), high = __byte_perm(first, second, 0x7362);
    for (int i = 0; i < 4; i++) pairs[i] = __byte_perm(i / 2 ? high : low, ONES, i % 2 ? 0x7372 : 0x7170);
  } else {
    const unsigned both = __byte_perm(first, second, half ? 0x7632 : 0x5410);
    code_pairs<4>(&both, pairs);
  }
}
// Return the low or the high value in a word.
template <class T>
__device__ inline float value_of(unsigned word, int high) {
  const unsigned short bits = high ? word >> 16 : word;
  T value;
  memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}
// Return the scale for lane c's columns, which belong to one of a product's PG groups side by side. If `first` is the
// number of groups, return its bias.
template <class T, int PG, int N>
__device__ inline float factor_of(const unsigned (&factors)[N], int first, int product, int c) {
  const int at = first + product * PG;
  if constexpr (PG == 1) {
    return value_of<T>(factors[at / 2], at % 2);
  } else if constexpr (PG == 2) {
    return value_of<T>(factors[at / 2], c / 2);
  } else {
    return value_of<T>(c < 2 ? factors[at / 2] : factors[at / 2 + 1], c % 2);
  }
}
// Powers of two that scale numbers of magnitude `most` or less to less than 2^15, and back.
__device__ inline unsigned exponent_of(float most) {
  const unsigned exponent = word_of(most) >> 23;
  return exponent < 15u ? 15u : exponent;
}
__device__ inline float to_half_range(unsigned exponent) {
  return float_of((268u - exponent) << 23);
}
__device__ inline float from_half_range(unsigned exponent) {
  return float_of((exponent - 14u) << 23);
}
// Return 2^(from - to), or 0 if that is below the range of floats.
__device__ inline float power_of_two(unsigned from, unsigned to) {
  return to - from < 127u ? float_of((127u + from - to) << 23) : 0.0f;
}
// Quantise a row of keys or values into a page, with the bits of quantized_write. A group takes eight of the warp's
// lanes.
template <class T, int BITS, int DIM, int GS, int BS>
__device__ inline void quantize_row(const T* row, unsigned* page, int at, int lane) {
  constexpr int GROUPS_OF_ROW = DIM / GS;
  constexpr int SHARE = GS / 8;
  constexpr float MOST = (1 << BITS) - 1;
  T* factors = reinterpret_cast<T*>(page + BS * (DIM * BITS / 32)) + at * (2 * GROUPS_OF_ROW);
  for (int first = 0; first < GROUPS_OF_ROW; first += 4) {
    const int group = first + lane / 8;
    const bool live = group < GROUPS_OF_ROW;
    const int dim = (live ? group : 0) * GS + lane % 8 * SHARE;
    float x[SHARE];
    float low = float_of(0x7f800000u), high = 0.0f;
    for (int i = 0; i < SHARE; i++) {
      x[i] = static_cast<float>(row[dim + i]);
      low = metal::min(low, x[i]);
      high = metal::max(high, x[i]);
    }
    for (int lanes = 1; lanes < 8; lanes *= 2) {
      low = metal::min(low, simd_shuffle_xor(low, lanes));
      high = metal::max(high, simd_shuffle_xor(high, lanes));
    }
    const Affine affine = affine_of(low, high, BITS);
    if (live) {
      if (lane % 8 == 0) {
        factors[group] = static_cast<T>(affine.scale);
        factors[GROUPS_OF_ROW + group] = static_cast<T>(affine.bias);
      }
      for (int i = 0; i < SHARE; i += 4) {
        unsigned codes = 0;
        for (int j = 0; j < 4; j++) {
          codes |= static_cast<unsigned>(metal::min(metal::round((x[i + j] - affine.bias) / affine.scale), MOST)) << j * BITS;
        }
        const int four = (at * DIM + dim + i) / 4;
        if (BITS == 8) {
          page[four] = codes;
        } else {
          reinterpret_cast<unsigned short*>(page)[four] = codes;
        }
      }
    }
  }
}
#endif

#pragma kernel
constexpr float NOTHING = -3.0e38f;

// join_partitions --------------------------------------------------------------------------------------------------

#if JOIN
// join_partitions joins the partitions that the COMMON kernels store for a line (row and query head), as the OWN kernels
// join their runs. Grid: x = line; a thread handles four values. The head's sink is added at the end.
const int n_heads = partial_shape[1];
const int line = blockIdx.x;
const int row = line / n_heads;
const int n_live = partitions_of<PART, SPAN>(metal::max(static_cast<int>(starts[row]), 0), static_cast<int>(ends[row])).count;
if (threadIdx.x < DV / 4) {
  State whole = {NOTHING, 1.0f};  // a row that sees no token gets zeros
  float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int64_t slot = static_cast<int64_t>(line) * stats_shape[1];
  join_runs<8>(n_live, 0, reinterpret_cast<const float4*>(partial) + slot * (DV / 4) + threadIdx.x, reinterpret_cast<const float2*>(stats) + slot, DV / 4, 1, whole, o);
  if (SINKS) join({static_cast<float>(sinks[line % n_heads]) * LOG2E, 1.0f}, make_float4(0.0f, 0.0f, 0.0f, 0.0f), whole, o);
  store_four(out + static_cast<int64_t>(line) * DV + threadIdx.x * 4, o.x / whole.l, o.y / whole.l, o.z / whole.l, o.w / whole.l);
}
#else

// Decode: what is multiplied ---------------------------------------------------------------------------------------

// Same partitions as paged_decode. A thread group handles a run of 1, 2 or 4 (2^params[3]) of them. The last group of a
// row and KV head to finish joins the runs, so there is no second kernel. Partitions are always joined as the same
// tree, four by four, so the result has the same bits for every length of runs.
#if COMMON
// A thread group handles a partition of up to ROWS rows that see the same blocks in it, or of a single row, as the OWN
// kernel does. With several rows its columns are the query heads of all. Each column is computed as it is for a single
// row, so it has the same bits. `items` lists the rows (shared_runs.py): partition, number of rows, their places in the
// batch. join_partitions joins the partitions. If this kernel did, one thread group would join those of all its rows,
// after all others have finished.
#endif
#if PAGED
// Each warp takes whole chunks of 16 * U tokens:
//   scores  S[token, head]  = K[token, dim] Q[dim, head]     K rows go from memory straight into the A fragments
//   output  O[dim, head]   += V^T[dim, token] P[token, head]  V rows are paired by byte permutes into A fragments
// Heads are the 8 columns (NT column tiles for more than 8). The order of dims inside a fragment is free if both
// factors have the same, so that every load is 16 bytes: a lane holds dims 8c.. of a key row, 8r.. of a value row. A
// probability is split into two 16-bit halves (high and remainder), so P is precise to about 2^-16.
constexpr int HEADS = G;  // of a single row
constexpr int NT = (G + 7) / 8;
constexpr int KT = (D + 31) / 32;    // 32 dims of a key row per load
constexpr int VT = (DV + 63) / 64;   // 64 dims of a value row per load
// Dim 8 a + b of an output is kept at b * DV / 8 + a of tg_o, which spreads stores over all banks. The inverse:
auto dim_of = [&](int place) { return place % (DV / 8) * 8 + place / (DV / 8); };
#elif QUANTIZED
// Pages of quantised keys and values (PageShape). The tensor cores multiply codes of 8 or 4 bits directly, as float16 with
// an offset (code_pairs). A group's scale s_g and bias b_g are applied to products and weights:
//   scores  S[token, head]  = sum over groups of s_g (C[token, dim] Q[dim, head]) + b_g sum(Q[dim, head])
//   output  O[dim, head]   += C^T[dim, token] (s_g P)[token, head], and at the end sum(b_g P) of the dim's group
// Queries and weights are float16, whatever T is: both are multiplied by powers of two so that the largest is just
// below 2^15. A query of bfloat16 loses nothing. A weight is rounded to 2^-11 of its size. What an offset adds is
// subtracted for the rounded weight, so rounding affects only the part of the codes.
// Codes become factors once for all heads. Lane c has a fourth of a group of a key row. A product has 8 columns: if all
// heads fit into them PG times, a product covers PG groups of values side by side, of which lane r has an eighth. Each
// group has columns of its own, with its scales; only a group's values in its own columns are outputs.
constexpr int HEADS = G * ROWS;  // query heads of all rows: codes become factors once for all of them
constexpr int NT = (HEADS + 7) / 8;
constexpr int KG = D / GS;   // groups of a row
constexpr int VG = DV / GS;
constexpr int KC = D * KBITS / 32;   // words of a row's codes; its scales and biases take KG words
constexpr int VC = DV * VBITS / 32;
constexpr int KW = GS * KBITS / 128;                          // words per lane and group of a key row
constexpr int KL = KW < 4 ? KW : 4;                           // words per load
constexpr int MOST = 1024 / (GS * VBITS);  // groups whose eighth is a load of 16 bytes
constexpr int PG = VG % 4 == 0 && HEADS <= 2 && MOST >= 4 ? 4 : VG % 2 == 0 && HEADS <= 4 && MOST >= 2 ? 2 : 1;
constexpr int COLUMNS = 8 / PG;      // columns per group
constexpr int VP = VG / PG;          // products per value row
constexpr int VD = GS * PG / 8;      // dims per lane and product of a value row
constexpr int VW = VD * VBITS < 32 ? 1 : VD * VBITS / 32;  // words of them; half a word counts as one
constexpr int TILES = DV / 16;
// The dim of an output at a place in tg_o. Place 8 k + r is the k-th dim of lane r.
auto dim_of = [&](int place) { return place / 8 / VD * (VD * 8) + place % 8 * VD + place / 8 % VD; };
#endif

// Rows and partitions of a thread group, and what ends a run -------------------------------------------------------

#if OWN
constexpr int WAITS = 2;  // first halves of a tree of joins that may wait
constexpr int AT_ONCE = DV <= 64 || GROUPS > 3 ? 8 : 16;  // runs; more do not fit the registers of four groups
#else
constexpr int WAITS = 1;
#endif
constexpr int CHUNK = 16 * U;

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
const int begin = metal::max(static_cast<int>(starts[row]), 0);
const int end = static_cast<int>(ends[row]);
const Partitions partitions = partitions_of<PART, SPAN>(begin, end);
const int size = partitions.size, origin = partitions.origin, n_live = partitions.count;
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
#if COMMON && PAGED
// A partition that several rows see.
#include "shared_decode.cuh"
#endif

// A warp's chunks: from queries, keys and values to a partition's outputs ------------------------------------------

// With plain pages of a single row; codes of all rows are read together.
if (first <= last && (n_rows == 1 || HEADS > G)) {
  const int* table = tables + sequence * max_blocks;
#if PAGED
  const float gain = SOFTCAP ? params[0] / params[1] : params[0] * LOG2E;
  uint4 query[NT][KT];  // column r, dims 32 * kt + 8c + 0..7
  UNROLL
  for (int n = 0; n < NT; n++) {
    UNROLL
    for (int kt = 0; kt < KT; kt++) {
      const int dim = kt * 32 + c * 8;
      const int column = n * 8 + r;
      query[n][kt] = make_uint4(0, 0, 0, 0);
      if (column < G && dim < D) query[n][kt] = *reinterpret_cast<const uint4*>(q + line_of(column) * D + dim);
    }
  }
  float acc[NT][VT][4][4];
#elif QUANTIZED
  uint query[NT][KG][GS / 32][4];           // column (head) r: lane c's fourth of a group, eight dims each
  float sums[NT][KG][2];                    // heads 2c and 2c + 1: sums over a group's dims
  float base[NT][KG][2];                    // minus what offsets add to a group's products, with two kinds of pairs
  float gain[NT][2];
  UNROLL
  for (int n = 0; n < NT; n++) {
    const int head = n * 8 + r % COLUMNS;
    uint4 raw[KG][GS / 32];
    float most = 0.0f;
    UNROLL
    for (int g = 0; g < KG; g++) {
      UNROLL
      for (int e = 0; e < GS / 32; e++) {
        // Lane c has every fourth load of a group.
        constexpr int EIGHTS = KL * 4 / KBITS;
        const int dim = g * GS + (e / EIGHTS * 4 + c) * (EIGHTS * 8) + e % EIGHTS * 8;
        raw[g][e] = make_uint4(0, 0, 0, 0);
        if (head < heads) raw[g][e] = *reinterpret_cast<const uint4*>(q + line_of(head) * D + dim);
        UNROLL
        for (int i = 0; i < 8; i++) most = ::fmaxf(most, ::fabsf(value_of<T>(word(raw[g][e], i / 2), i % 2)));
      }
    }
    most = ::fmaxf(most, simd_shuffle_xor(most, 1));
    most = ::fmaxf(most, simd_shuffle_xor(most, 2));
    const unsigned exponent = exponent_of(most);
    const float own_gain = (SOFTCAP ? params[0] / params[1] : params[0] * LOG2E) * from_half_range(exponent);
    UNROLL
    for (int g = 0; g < KG; g++) {
      float sum[2] = {0.0f, 0.0f};  // per kind of pairs
      UNROLL
      for (int e = 0; e < GS / 32; e++) {
        UNROLL
        for (int i = 0; i < 4; i++) {
          float x[2];
          UNROLL
          for (int j = 0; j < 2; j++) {
            const int at = pair_member<KBITS>(i, j);
            x[j] = value_of<T>(word(raw[g][e], at / 2), at % 2) * to_half_range(exponent);
            sum[i % 2] += x[j];
          }
          query[n][g][e][i] = pack_rounded<Half>(x[0], x[1]);
        }
      }
      UNROLL
      for (int i = 0; i < 2; i++) {
        sum[i] += simd_shuffle_xor(sum[i], 1);
        sum[i] += simd_shuffle_xor(sum[i], 2);
      }
      UNROLL
      for (int i = 0; i < 2; i++) {
        const int other = c * 8 + i * 4;
        sums[n][g][i] = simd_shuffle(sum[0] + sum[1], other);
        if (KINDS<KBITS> == 2) base[n][g][i] = simd_shuffle(-(sum[0] * offset_of<KBITS>(0) + sum[1] * offset_of<KBITS>(1)), other);
      }
    }
    UNROLL
    for (int i = 0; i < 2; i++) gain[n][i] = simd_shuffle(own_gain, c * 8 + i * 4);
  }
  float acc[NT][TILES][4];
  // Sums over a lane's tokens for heads 2c and 2c + 1: of p * bias, and of the rounded weights. Offsets have added the
  // latter times the offset.
  float plus[NT][VP][2], added[NT][VP][2];
#endif
  float m[NT][2], l[NT][2];

  const int first_chunk = lo / CHUNK;
  const int last_chunk = (hi - 1) / CHUNK;
  const int first_block = lo / BS;
  const int last_block = (hi - 1) / BS;
  // Look up the block ids of a chunk's 8-token halves, once per block. A half or token outside [lo, hi) is replaced by
  // the nearest one inside, so that every address is of a live token.
  auto look_up = [&](int chunk, int (&ids)[U * 2]) {
    UNROLL
    for (int i = 0; i < U * 2; i++) {
      ids[i] = i == 0 || i * 8 % BS == 0 ? table[metal::min(metal::max((chunk * CHUNK + i * 8) / BS, first_block), last_block)] : ids[i - 1];
    }
  };
  auto slot = [&](int token) { return metal::min(metal::max(token, lo), hi - 1) % BS; };
#if PAGED
  const T* k_head = k_pool + kv_head * (BS * D) + c * 8;
  const T* v_head = v_pool + kv_head * (BS * DV) + r * 8;
  uint4 keys[U][2][KT];    // token r of each half
  uint4 values[U][4][VT];  // tokens 2c, 2c + 1 of each half
  auto load_keys = [&](int chunk, const int (&ids)[U * 2]) {
    UNROLL
    for (int i = 0; i < U * 2; i++) {
      const T* source = k_head + static_cast<int64_t>(ids[i]) * (n_kv * BS * D) + slot(chunk * CHUNK + i * 8 + r) * D;
      UNROLL
      for (int kt = 0; kt < KT; kt++) {
        keys[i / 2][i % 2][kt] = D % 32 == 0 || kt * 32 + c * 8 < D ? stream_load(source + kt * 32) : make_uint4(0, 0, 0, 0);
      }
    }
  };
  auto load_values = [&](int chunk, const int (&ids)[U * 2]) {
    UNROLL
    for (int i = 0; i < U * 4; i++) {
      const T* source = v_head + static_cast<int64_t>(ids[i / 2]) * (n_kv * BS * DV) + slot(chunk * CHUNK + i / 2 * 8 + c * 2 + i % 2) * DV;
      UNROLL
      for (int vt = 0; vt < VT; vt++) {
        values[i / 4][i % 4][vt] = DV % 64 == 0 || vt * 64 + r * 8 < DV ? stream_load(source + vt * 64) : make_uint4(0, 0, 0, 0);
      }
    }
  };
#elif QUANTIZED
  // Strides are in bytes, so that an address is a product and a sum. Codes are those of this lane.
  const int k_stride = n_kv * (BS * (KC + KG) * 4), v_stride = n_kv * (BS * (VC + VG) * 4);
  const char* k_codes = reinterpret_cast<const char*>(k_pool + kv_head * (BS * (KC + KG)) + c * KL);
  const char* k_page = reinterpret_cast<const char*>(k_pool + kv_head * (BS * (KC + KG)) + BS * KC);
  const char* v_codes = reinterpret_cast<const char*>(v_pool + kv_head * (BS * (VC + VG))) + r * (VD * VBITS / 8);
  const char* v_page = reinterpret_cast<const char*>(v_pool + kv_head * (BS * (VC + VG)) + BS * VC);
  auto row_of = [&](const char* first, int stride, int id, int at, int bytes) {
    return first + static_cast<int64_t>(id) * stride + static_cast<int64_t>(at) * bytes;
  };
  unsigned keys[U][2][KG][KW];       // token r of each half
  unsigned values[U][4][VP][VW];     // tokens 2c, 2c + 1 of each half
  unsigned key_factors[U][2][KG];    // token r of each half: scales, then biases
  unsigned value_factors[U][2][VG];
  auto load_keys = [&](int chunk, const int (&ids)[U * 2]) {
    UNROLL
    for (int i = 0; i < U * 2; i++) {
      const int at = slot(chunk * CHUNK + i * 8 + r);
      const auto* codes = reinterpret_cast<const unsigned*>(row_of(k_codes, k_stride, ids[i], at, KC * 4));
      UNROLL
      for (int w = 0; w < KG * KW; w += KL) stream_words<KL, KL * 16 % 32 == 0>(codes + w * 4, &keys[i / 2][i % 2][w / KW][w % KW]);
      load_factors(reinterpret_cast<const unsigned*>(row_of(k_page, k_stride, ids[i], at, KG * 4)), key_factors[i / 2][i % 2]);
    }
  };
  auto load_values = [&](int chunk, const int (&ids)[U * 2]) {
    UNROLL
    for (int i = 0; i < U * 4; i++) {
      const int at = slot(chunk * CHUNK + i / 2 * 8 + c * 2 + i % 2);
      const char* codes = row_of(v_codes, v_stride, ids[i / 2], at, VC * 4);
      UNROLL
      for (int g = 0; g < VP; g++) {
        if (VD * VBITS < 32) {
          values[i / 4][i % 4][g][0] = stream_half_word(reinterpret_cast<const unsigned short*>(codes) + g * 8);
        } else {
          stream_words<VW, true>(reinterpret_cast<const unsigned*>(codes) + g * (VW * 8), values[i / 4][i % 4][g]);
        }
      }
      if (i % 2 == 0) {
        const int own = slot(chunk * CHUNK + i / 2 * 8 + r);
        load_factors(reinterpret_cast<const unsigned*>(row_of(v_page, v_stride, ids[i / 2], own, VG * 4)), value_factors[i / 4][i / 2 % 2]);
      }
    }
  };
#endif

  // Software pipeline: the registers of a chunk's keys are refilled as soon as its scores are known, those of its
  // values at the end, so that loads are always in flight; block ids are fetched two chunks ahead.
  int ids[U * 2];
  if (fresh >= lo && fresh < hi && fresh / CHUNK % SG == warp) {
#if PAGED
    // Stored by the warp that loads it again below.
    const int64_t at = (static_cast<int64_t>(table[fresh / BS]) * n_kv + kv_head) * BS + fresh % BS;
    for (int dim = lane * 8; dim < D; dim += 256) *reinterpret_cast<uint4*>(const_cast<T*>(k_pool) + at * D + dim) = *reinterpret_cast<const uint4*>(k_new + unit * D + dim);
    for (int dim = lane * 8; dim < DV; dim += 256) *reinterpret_cast<uint4*>(const_cast<T*>(v_pool) + at * DV + dim) = *reinterpret_cast<const uint4*>(v_new + unit * DV + dim);
#elif QUANTIZED
    // Quantised and stored by the warp that loads it again below.
    const int64_t page = static_cast<int64_t>(table[fresh / BS]) * n_kv + kv_head;
    quantize_row<T, KBITS, D, GS, BS>(k_new + unit * D, const_cast<unsigned*>(k_pool) + page * (BS * (KC + KG)), fresh % BS, lane);
    quantize_row<T, VBITS, DV, GS, BS>(v_new + unit * DV, const_cast<unsigned*>(v_pool) + page * (BS * (VC + VG)), fresh % BS, lane);
#endif
    __syncwarp();
  }
  int chunk = first_chunk + (warp + SG - first_chunk % SG) % SG;
  if (chunk <= last_chunk) {
    look_up(chunk, ids);
    load_keys(chunk, ids);
    load_values(chunk, ids);
    look_up(chunk + SG, ids);
  }
  for (int part = 0; first + part <= last; part++) {
#if QUANTIZED
    unsigned range = 15;  // largest exponent of the scales so far, which sets the weights' power of two
#endif
    UNROLL
    for (int n = 0; n < NT; n++) {
      UNROLL
#if PAGED
      for (int i = 0; i < VT * 16; i++) acc[n][i / 16][i / 4 % 4][i % 4] = 0.0f;
#elif QUANTIZED
      for (int i = 0; i < TILES * 4; i++) acc[n][i / 4][i % 4] = 0.0f;
      UNROLL
      for (int i = 0; i < VP * 2; i++) plus[n][i / 2][i % 2] = added[n][i / 2][i % 2] = 0.0f;
#endif
      m[n][0] = m[n][1] = NOTHING;
      l[n][0] = l[n][1] = 0.0f;
    }
    const int part_end = metal::min(last_chunk, (origin + (first + part + 1) * size) / CHUNK - 1);
    for (; chunk <= part_end; chunk += SG) {
      const bool more = chunk + SG <= last_chunk;
      float scores[NT][U][4];  // (token r, columns 2c and 2c + 1), then token r + 8
#if PAGED
      UNROLL
      for (int n = 0; n < NT; n++) {
        UNROLL
        for (int u = 0; u < U; u++) {
          UNROLL
          for (int i = 0; i < 4; i++) scores[n][u][i] = 0.0f;
          UNROLL
          for (int kt = 0; kt < KT; kt++) {
            const uint4 a = keys[u][0][kt];
            const uint4 b = keys[u][1][kt];
            const uint4 x = query[n][kt];
            mma<T>(scores[n][u], a.x, b.x, a.y, b.y, x.x, x.y);
            mma<T>(scores[n][u], a.z, b.z, a.w, b.w, x.z, x.w);
          }
        }
      }
#elif QUANTIZED
      UNROLL
      for (int u = 0; u < U; u++) {
        UNROLL
        for (int g = 0; g < KG; g++) {
          float products[NT][4];
          UNROLL
          for (int i = 0; i < NT * 4; i++) products[i / 4][i % 4] = KINDS<KBITS> == 2 ? base[i / 4][g][i % 2] : -OFFSET * sums[i / 4][g][i % 2];
          UNROLL
          for (int e = 0; e < GS / 32; e++) {
            unsigned a[4], b[4];
            code_pairs<KBITS>(&keys[u][0][g][e * KBITS / 4], a);
            code_pairs<KBITS>(&keys[u][1][g][e * KBITS / 4], b);
            UNROLL
            for (int n = 0; n < NT; n++) {
              const auto& column = query[n][g][e];
              mma<Half>(products[n], a[0], b[0], a[1], b[1], column[0], column[1]);
              mma<Half>(products[n], a[2], b[2], a[3], b[3], column[2], column[3]);
            }
          }
          UNROLL
          for (int half = 0; half < 2; half++) {
            const auto& factors = key_factors[u][half];
            const float scale = value_of<T>(factors[g / 2], g % 2), bias = value_of<T>(factors[(KG + g) / 2], (KG + g) % 2);
            UNROLL
            for (int n = 0; n < NT; n++) {
              UNROLL
              for (int i = 0; i < 2; i++) {
                float& score = scores[n][u][half * 2 + i];
                const float product = g == 0 ? bias * sums[n][g][i] : ::fmaf(bias, sums[n][g][i], score);
                score = ::fmaf(scale, products[n][half * 2 + i], product);
              }
            }
          }
        }
      }
#endif
      if (more) load_keys(chunk + SG, ids);

      float top[NT][2], shrink[NT][2];
      bool grown = false;
      UNROLL
      for (int n = 0; n < NT; n++) {
        top[n][0] = m[n][0];
        top[n][1] = m[n][1];
        UNROLL
        for (int u = 0; u < U; u++) {
          UNROLL
          for (int i = 0; i < 4; i++) {
            const int token = chunk * CHUNK + u * 16 + i / 2 * 8 + r;
#if PAGED
            float s = product(scores[n][u][i], gain);
#elif QUANTIZED
            float s = scores[n][u][i] * gain[n][i % 2];
#endif
            if (SOFTCAP) s = product(::tanhf(s), params[1] * LOG2E);
            scores[n][u][i] = token >= lo && token < hi ? s : NOTHING;
            top[n][i % 2] = ::fmaxf(top[n][i % 2], scores[n][u][i]);
          }
        }
        UNROLL
        for (int i = 0; i < 2; i++) {
          float& x = top[n][i];
          x = ::fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
          x = ::fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 8));
          x = ::fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 16));
          shrink[n][i] = metal::fast::exp2(m[n][i] - x);
          grown = grown || shrink[n][i] != 1.0f;
          m[n][i] = x;
          l[n][i] = product(l[n][i], shrink[n][i]);
        }
#if QUANTIZED
        UNROLL
        for (int i = 0; i < U * 4; i++) {
          float& s = scores[n][i / 4][i % 4];  // a weight from here on; 0 for dead tokens, since each chunk has a live one
          s = metal::fast::exp2(s - top[n][i % 2]);
          l[n][i % 2] += s;
        }
#endif
      }
#if PAGED
      UNROLL
      for (int n = 0; n < NT; n++) {
        UNROLL
        for (int i = 0; i < VT * 16; i++) acc[n][i / 16][i / 4 % 4][i % 4] *= shrink[n][i % 2];
      }
      UNROLL
      for (int u = 0; u < U; u++) {
        // 8 tokens x 8 columns, transposed, are the B fragment: column r, tokens 2c and 2c + 1.
        uint high[NT][2], rest[NT][2];
        UNROLL
        for (int n = 0; n < NT; n++) {
          UNROLL
          for (int half = 0; half < 2; half++) {
            float p[2];
            UNROLL
            for (int i = 0; i < 2; i++) {
              const float s = scores[n][u][half * 2 + i];
              p[i] = s > NOTHING ? metal::fast::exp2(s - top[n][i]) : 0.0f;
              l[n][i] += p[i];
            }
            const uint rounded = pack_rounded<T>(p[0], p[1]);
            high[n][half] = transpose8x8(rounded);
            rest[n][half] = transpose8x8(pack_rounded<T>(p[0] - low_of<T>(rounded), p[1] - high_of<T>(rounded)));
          }
        }
        UNROLL
        for (int vt = 0; vt < VT; vt++) {
          UNROLL
          for (int j = 0; j < 4; j++) {
            const uint v0 = word(values[u][0][vt], j), v1 = word(values[u][1][vt], j);
            const uint v2 = word(values[u][2][vt], j), v3 = word(values[u][3][vt], j);
            // Dim 2j of the lane's eight is row r of the tile, dim 2j + 1 row r + 8.
            const uint a0 = __byte_perm(v0, v1, 0x5410), a1 = __byte_perm(v0, v1, 0x7632);
            const uint a2 = __byte_perm(v2, v3, 0x5410), a3 = __byte_perm(v2, v3, 0x7632);
            UNROLL
            for (int n = 0; n < NT; n++) {
              mma<T>(acc[n][vt][j], a0, a1, a2, a3, high[n][0], high[n][1]);
              mma<T>(acc[n][vt][j], a0, a1, a2, a3, rest[n][0], rest[n][1]);
            }
          }
        }
      }
#elif QUANTIZED
      // Most chunks raise no maximum, and no largest scale.
      if (simd_any(grown)) {
        UNROLL
        for (int n = 0; n < NT; n++) {
          UNROLL
          for (int i = 0; i < TILES * 4; i++) acc[n][i / 4][i % 4] *= shrink[n][i % 2];
          UNROLL
          for (int i = 0; i < VP * 2; i++) {
            plus[n][i / 2][i % 2] *= shrink[n][i % 2];
            added[n][i / 2][i % 2] *= shrink[n][i % 2];
          }
        }
      }
      float most = 0.0f;
      UNROLL
      for (int i = 0; i < U * 2 * VG; i++) {
        const int g = i % VG;
        most = ::fmaxf(most, ::fabsf(value_of<T>(value_factors[i / VG / 2][i / VG % 2][g / 2], g % 2)));
      }
      const unsigned exponent = exponent_of(largest_of(most));
      if (exponent > range) {
        UNROLL
        for (int i = 0; i < NT * TILES * 4; i++) acc[i / (TILES * 4)][i / 4 % TILES][i % 4] *= power_of_two(range, exponent);
        UNROLL
        for (int i = 0; i < NT * VP * 2; i++) added[i / (VP * 2)][i / 2 % VP][i % 2] *= power_of_two(range, exponent);
        range = exponent;
      }

      UNROLL
      for (int u = 0; u < U; u++) {
        UNROLL
        for (int g = 0; g < VP; g++) {
          // 8 tokens x 8 heads, transposed, are the B fragment: column (head) r, tokens 2c and 2c + 1.
          unsigned weight[NT][2];
          UNROLL
          for (int half = 0; half < 2; half++) {
            const auto& factors = value_factors[u][half];
            const float scale = factor_of<T, PG>(factors, 0, g, c), bias = factor_of<T, PG>(factors, VG, g, c);
            const float ranged = scale * to_half_range(range);
            UNROLL
            for (int n = 0; n < NT; n++) {
              const float* p = &scores[n][u][half * 2];
              const unsigned rounded = pack_rounded<Half>(p[0] * ranged, p[1] * ranged);
              UNROLL
              for (int i = 0; i < 2; i++) {
                plus[n][g][i] = ::fmaf(p[i], bias, plus[n][g][i]);
                added[n][g][i] += value_of<Half>(rounded, i);
              }
              weight[n][half] = transpose8x8(rounded);
            }
          }
          UNROLL
          for (int four = 0; four < VD / 4; four++) {
            const int w = four * VBITS / 8;
            unsigned a[4], b[4];
            token_pairs<VBITS>(values[u][0][g][w], values[u][1][g][w], four % 2, a);
            token_pairs<VBITS>(values[u][2][g][w], values[u][3][g][w], four % 2, b);
            UNROLL
            for (int j = 0; j < 2; j++) {
              // Dim 2j of the four is row r of the tile, dim 2j + 1 row r + 8.
              UNROLL
              for (int n = 0; n < NT; n++) {
                auto& tile = acc[n][(g * (VD / 4) + four) * 2 + j];
                mma<Half>(tile, a[j * 2], a[j * 2 + 1], b[j * 2], b[j * 2 + 1], weight[n][0], weight[n][1]);
              }
            }
          }
        }
      }
#endif
      if (more) {
        load_values(chunk + SG, ids);
        look_up(chunk + 2 * SG, ids);
      }
    }
#if QUANTIZED

    // Subtract what the offsets have added, and add the part of the biases.
    UNROLL
    for (int i = 0; i < NT * VP * 2; i++) {
      UNROLL
      for (int lanes = 4; lanes < 32; lanes *= 2) {
        plus[i / (VP * 2)][i / 2 % VP][i % 2] += simd_shuffle_xor(plus[i / (VP * 2)][i / 2 % VP][i % 2], lanes);
        added[i / (VP * 2)][i / 2 % VP][i % 2] += simd_shuffle_xor(added[i / (VP * 2)][i / 2 % VP][i % 2], lanes);
      }
    }
    UNROLL
    for (int i = 0; i < NT * TILES * 4; i++) {
      const int n = i / (TILES * 4), g = i / 4 % TILES / (VD / 2);
      float& x = acc[n][i / 4 % TILES][i % 4];
      x = ::fmaf(::fmaf(added[n][g][i % 2], -offset_of<VBITS>(i / 2 % KINDS<VBITS>), x), from_half_range(range), plus[n][g][i % 2]);
    }
#endif
    if (part > 0) __syncthreads();
    store_sums(m, l);
    UNROLL
    for (int h0 = 0; h0 < HEADS; h0 += HR) {
      if (h0 > 0) __syncthreads();
      // Store a warp's outputs of a round for the other warps.
      UNROLL
      for (int n = 0; n < NT; n++) {
        UNROLL
#if PAGED
        for (int i = 0; i < VT * 16; i++) {
          const int head = n * 8 + c * 2 + i % 2;
          const int eight = i / 16 * 8 + r;  // of dims
          if (head >= h0 && head < h0 + HR && head < G && eight < DV / 8) tg_o[warp * HR + head - h0][(i / 4 % 4 * 2 + i / 2 % 2) * (DV / 8) + eight] = acc[n][i / 16][i / 4 % 4][i % 4];
        }
#elif QUANTIZED
        for (int i = 0; i < TILES * 4; i++) {
          const int head = n * 8 + (c * 2 + i % 2) % COLUMNS;
          if (c * 2 / COLUMNS == r * PG / 8 && head >= h0 && head < h0 + HR && head < heads) tg_o[warp * HR + head - h0][i / 2 * 8 + r] = acc[n][i / 4][i % 4];
        }
#endif
      }
      // Join the outputs in tg_o, from head h0 on, of all warps, then of partitions, always as the same tree.
      __syncthreads();
      for (int item = threadIdx.x; item < HR * DV / 4; item += SG * 32) {
        const int head = h0 + item / (DV / 4);
        const int at = item % (DV / 4);
        if (head < heads) {
          State whole = {tg_m[head], tg_l[head]};
          float4 o = *reinterpret_cast<const float4*>(&tg_o[head - h0][at * 4]);
          UNROLL
          for (int s = 1; s < SG; s++) {
            const State before = whole;
            const float4 before_o = o;
            whole = {tg_m[s * NT * 8 + head], tg_l[s * NT * 8 + head]};
            o = *reinterpret_cast<const float4*>(&tg_o[s * HR + head - h0][at * 4]);
            join(before, before_o, whole, o);
          }
          if (part % 2 == 1) join(wait[0][head], wait_o[0][head][at], whole, o);
          if (WAITS > 1 && (part == 3 || (part == 2 && first + part == last))) join(wait[WAITS - 1][head], wait_o[WAITS - 1][head][at], whole, o);
          if (first + part < last) {
            wait_o[part % WAITS][head][at] = o;
            if (at == 0) wait[part % WAITS][head] = whole;
          } else {
            end_run(head, at, whole, o);
          }
        }
      }
    }
  }
}

// Joins of runs ----------------------------------------------------------------------------------------------------

#if OWN
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
    join_runs<AT_ONCE>(n_live, run_shift, reinterpret_cast<const float4*>(partial) + slot * (DV / 4) + at, stats + slot, G * DV / 4, G, whole, o);
    finish(head, at, whole, o);
  }
}
if (n_live == 0 && run == 0) {
  for (int item = threadIdx.x; item < G * DV; item += SG * 32) {
    out[line_of(item / DV) * DV + item % DV] = static_cast<T>(0.0f);
  }
}
#endif
#endif
