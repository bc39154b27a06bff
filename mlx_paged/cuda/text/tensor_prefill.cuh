#if QUANTIZED
constexpr unsigned ONES = 0x64006400u;  // with a code in its low bits, 1024 plus the code, as float16
// Dequantise eight consecutive codes, in one or two words, into pairs in order: scale * code + bias, rounded once to T
// like mx.dequantize. Words `scale` and `bias` hold their value twice.
template <class T, int BITS>
__device__ inline void value_pairs(const unsigned* words, unsigned scale, unsigned bias, unsigned (&pairs)[4]) {
  constexpr unsigned ONE = is_half<T> ? 0x3c003c00u : 0x3f803f80u;
  for (int i = 0; i < 4; i++) {
    unsigned codes;
    if constexpr (BITS == 4) {
      // The high code of a byte is at bit 4, or at bit 3 for bfloat16, which has fewer bits.
      constexpr unsigned MASK = is_half<T> ? 0x00f0000fu : 0x0078000fu;
      constexpr unsigned EXPONENTS = is_half<T> ? 0x54006400u : 0x41804300u;  // 64 and 1024, 16 and 128
      constexpr unsigned OFFSETS = is_half<T> ? 0xd400e400u : 0xc180c300u;
      const unsigned both = __byte_perm(words[0], is_half<T> ? words[0] : words[0] >> 1, 0x4400 + i * 0x1111);
      codes = fma2<T>(select_bits(both, MASK, EXPONENTS), ONE, OFFSETS);
    } else if constexpr (is_half<T>) {
      codes = fma2<T>(__byte_perm(words[i / 2], ONES, i % 2 ? 0x7372 : 0x7170), ONE, 0xe400e400u);
    } else {
      // Codes as the low bits of a float of exponent 23.
      const float low = float_of(__byte_perm(words[i / 2], 0x4b000000u, 0x7440 + i % 2 * 2));
      const float high = float_of(__byte_perm(words[i / 2], 0x4b000000u, 0x7441 + i % 2 * 2));
      codes = pack_rounded<T>(low - 8388608.0f, high - 8388608.0f);
    }
    pairs[i] = fma2<T>(codes, scale, bias);
  }
}
// Return a word with one half of a word twice.
__device__ inline unsigned both_halves(unsigned word, int high) {
  return __byte_perm(word, 0, high ? 0x3232 : 0x1010);
}
#endif

#pragma kernel
// CUDA only: causal attention of the new tokens of several sequences, of any lengths, over block tables. 16-bit types
// on the tensor cores (mma.sync m16n8k16, float accumulators).
// A thread group handles one KV head and one tile: up to M / G new tokens of one sequence, times the G query heads of
// the KV head. Row n of its M rows is head n % G of token n / G. A warp handles RT times 16 rows. Scores, probabilities
// and outputs stay in its registers; keys and values pass through shared memory, KEYS tokens at a time:
//   scores  S[row, token] = Q[row, dim] K^T[dim, token]
//   output  O[row, dim]  += P[row, token] V[token, dim]    the accumulators of S are, in pairs, the A fragments of P
// Tiles start at a sequence's first new token and keys at multiples of KEYS, so a row's bits do not depend on the pack.
// Probabilities are rounded to T: the errors average out over the hundreds of tokens that a new token sees.
constexpr int M = 16 * RT * SG;
constexpr int THREADS = 32 * SG;
constexpr int KW = D + 8;   // a row of keys in shared memory, padded so that eight rows lie in different banks
constexpr int VW = DV + 8;
constexpr int STAGE = KEYS * (KW + VW);
constexpr int BLOCKS = KEYS > BS ? KEYS / BS : 1;  // blocks that KEYS tokens span
constexpr float NOTHING = -1.0e30f;

SHARED_ARRAY(T, shared, STAGE * BUFFERS + (QS ? M * KW : 0));
T* const queries = shared + STAGE * BUFFERS;

const int n_kv = k_pool_shape[1];
const int unit = threadgroup_position_in_grid.x;
// The heads of a tile follow each other: those of a token lie next to each other.
const int kv_head = unit % n_kv;
const int* tile = tiles + unit / n_kv * 4;
const int first_row = tile[1];  // of the tile's first token, in the pack
const int origin = tile[2];     // position of that token
const int n_tokens = tile[3];
const int thread_index = thread_position_in_threadgroup.x;
const int lane = thread_index_in_simdgroup;
const int warp = simdgroup_index_in_threadgroup;
const int r = lane / 4;
const int c = lane % 4;
const int first_line = warp * (RT * 16) + r;  // first row of the lane; the others follow in steps of 8
const int window = static_cast<int>(params[2]);
const int stride = static_cast<int>(params[3]);
// A token sees at most `window` tokens, itself included, from a multiple of the stride on.
auto first_seen = [=](int position) {
  return (metal::max(position - window + 1, 0) + stride - 1) / stride * stride;
};
const int lo = first_seen(origin);
const int hi = origin + n_tokens;
const int first = lo / KEYS;
const int last = (hi - 1) / KEYS;
const float gain = SOFTCAP ? 1.0f : params[0] * LOG2E;
const int* table = tables + static_cast<int64_t>(tile[0]) * tables_shape[1];
AsyncCopies copies;
#if PAGED
// paged_prefill_tensor: the head's keys and values.
const T* k_head = k_pool + static_cast<int64_t>(kv_head) * (BS * D);
const T* v_head = v_pool + static_cast<int64_t>(kv_head) * (BS * DV);
auto wait = [&] { copies.wait(); };
#elif QUANTIZED
// quantized_prefill_tensor: keys and values have the bits of mx.dequantize, and lie in shared memory as those of the
// dense kernel. Each thread first copies codes of a step to shared memory, asynchronously. Once its own have arrived,
// it dequantises them, 16 or 32 codes of a token at a time, all of one group.
constexpr int K_ROW = D / 32 * KBITS + D / GS;   // words
constexpr int V_ROW = DV / 32 * VBITS + DV / GS;
constexpr int K_ITEMS = (KEYS * D / 128 * KBITS + THREADS - 1) / THREADS;   // loads of 16 bytes per thread
constexpr int V_ITEMS = (KEYS * DV / 128 * VBITS + THREADS - 1) / THREADS;
constexpr int ITEMS = K_ITEMS > V_ITEMS ? K_ITEMS : V_ITEMS;
__shared__ __align__(16) uint raw[ITEMS * THREADS * 4];
__shared__ uint scales[ITEMS * THREADS], biases[ITEMS * THREADS];  // words with each load's scale or bias
const uint* k_head = k_pool + static_cast<int64_t>(kv_head) * (BS * K_ROW);
const uint* v_head = v_pool + static_cast<int64_t>(kv_head) * (BS * V_ROW);
bool is_value = false;  // whether the last copies begun are of values
// The token of a thread's i-th item, and the load of the token's row. Eight consecutive lanes have eight tokens, so
// they store into different banks.
auto token_of = [&](int i, int loads) {
  return (i * (THREADS / 8) + thread_index / 8) / loads * 8 + thread_index % 8;
};
auto load_of = [&](int i, int loads) { return (i * (THREADS / 8) + thread_index / 8) % loads; };
auto dequantize = [&](auto width, auto bits, T* target) {
  constexpr int DIM = decltype(width)::value, BITS = decltype(bits)::value;
  constexpr int LOADS = DIM * BITS / 128, CODES = 128 / BITS;
  UNROLL
  for (int i = 0; i * THREADS < KEYS * LOADS; i++) {
    if (KEYS * LOADS % THREADS == 0 || i * THREADS + thread_index < KEYS * LOADS) {
      const int g = load_of(i, LOADS) * CODES / GS;
      const uint scale = both_halves(scales[i * THREADS + thread_index], g % 2);
      const uint bias = both_halves(biases[i * THREADS + thread_index], (DIM / GS + g) % 2);
      T* const row = target + token_of(i, LOADS) * (DIM + 8) + load_of(i, LOADS) * CODES;
      const uint4 codes = load_aligned(raw + (i * THREADS + thread_index) * 4);
      UNROLL
      for (int j = 0; j < CODES / 8; j++) {
        const uint words[2] = {word(codes, j * BITS / 4), word(codes, j * BITS / 4 + BITS / 8)};
        uint pairs[4];
        value_pairs<T, BITS>(words, scale, bias, pairs);
        store_words(row + j * 8, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
      }
    }
  }
};
auto wait = [&] {
  copies.wait();
  if (is_value) {
    dequantize(Number<DV>(), Number<VBITS>(), shared + KEYS * KW);
  } else {
    dequantize(Number<D>(), Number<KBITS>(), shared);
  }
};
#endif
// Prefill kernels for tensor cores: the lines of a tile's rows, and the blocks of a step.
if (unit + thread_index == 0) {
  fence_out[0] = fence[0] + 1u;
}
if (n_tokens == 0) return;

// Return the line of a row in q and out. Rows past the last token repeat those of the last, and are not stored.
auto line_of = [&](int row) {
  return (static_cast<int64_t>(first_row + metal::min(row / G, n_tokens - 1)) * n_kv + kv_head) * G + row % G;
};
// Return the ids of a step's blocks, one per lane.
auto look_up = [&](int step) {
  return table[metal::min(metal::max(step * KEYS / BS + metal::min(lane, BLOCKS - 1), lo / BS), (hi - 1) / BS)];
};
#if PAGED
// paged_prefill_tensor: loads of a step's keys and values. Dead tokens become zeros: their slots may hold NaN, and NaN
// times a weight of 0 is NaN.
auto load = [&](auto width, const T* head, T* target, int step, int ids) {
  constexpr int DIM = decltype(width)::value;
  constexpr int CHUNKS = DIM / 8;
  constexpr bool EVEN = THREADS % CHUNKS == 0;  // then a thread's addresses differ by constants
  const int stride = n_kv * (BS * DIM);         // of a block
  UNROLL
  for (int i = 0; i < KEYS * CHUNKS; i += THREADS) {
    const int item = i + thread_index;
    const int token = EVEN ? i / CHUNKS + thread_index / CHUNKS : item / CHUNKS;
    const int chunk = EVEN ? thread_index % CHUNKS : item % CHUNKS;
    const int slot = KEYS < BS ? step * KEYS % BS + token : token % BS;
    const int id = BLOCKS == 1 ? ids : simd_shuffle(ids, static_cast<ushort>(token / BS % BLOCKS));
    const bool live = static_cast<uint>(step * KEYS + token - lo) < static_cast<uint>(hi - lo);
    if (KEYS * CHUNKS % THREADS == 0 || item < KEYS * CHUNKS) {
      copies.copy(target + token * (DIM + 8) + chunk * 8, head + static_cast<int64_t>(id) * stride + (slot * DIM + chunk * 8), live);
    }
  }
};
auto load_keys = [&](int step, int ids) { load(Number<D>(), k_head, shared + (step - first) % BUFFERS * STAGE, step, ids); };
auto load_values = [&](int step, int ids) {
  load(Number<DV>(), v_head, shared + (step - first) % BUFFERS * STAGE + KEYS * KW, step, ids);
};
#elif QUANTIZED
// quantized_prefill_tensor: loads of a step's codes. Dead tokens have scales and biases of 0: their slots may hold NaN,
// and NaN times a weight of 0 is NaN.
auto load = [&](auto width, auto bits, const uint* head, int step, int ids) {
  constexpr int DIM = decltype(width)::value, BITS = decltype(bits)::value;
  constexpr int LOADS = DIM * BITS / 128, WORDS = DIM * BITS / 32, ROW_GROUPS = DIM / GS;
  const int stride = n_kv * (BS * (WORDS + ROW_GROUPS));  // of a block
  UNROLL
  for (int i = 0; i * THREADS < KEYS * LOADS; i++) {
    const int token = token_of(i, LOADS), at = load_of(i, LOADS);
    const int slot = KEYS < BS ? step * KEYS % BS + token : token % BS;
    const int id = BLOCKS == 1 ? ids : simd_shuffle(ids, static_cast<ushort>(token / BS % BLOCKS));
    if (KEYS * LOADS % THREADS == 0 || i * THREADS + thread_index < KEYS * LOADS) {
      const bool live = static_cast<uint>(step * KEYS + token - lo) < static_cast<uint>(hi - lo);
      const uint* page = head + static_cast<int64_t>(id) * stride;
      const uint* factors = page + BS * WORDS + slot * ROW_GROUPS;
      const int g = at * 128 / BITS / GS;
      copies.copy(raw + (i * THREADS + thread_index) * 4, page + slot * WORDS + at * 4, live);
      copies.copy_word(scales + i * THREADS + thread_index, factors + g / 2, live);
      copies.copy_word(biases + i * THREADS + thread_index, factors + (ROW_GROUPS + g) / 2, live);
    }
  }
};
auto load_keys = [&](int step, int ids) {
  is_value = false;
  load(Number<D>(), Number<KBITS>(), k_head, step, ids);
};
auto load_values = [&](int step, int ids) {
  is_value = true;
  load(Number<DV>(), Number<VBITS>(), v_head, step, ids);
};
#endif
// Prefill kernels for tensor cores: the loop over steps of keys and values, and the stores of the results.
int ids = look_up(first);
if (QS) {
  UNROLL
  for (int i = 0; i < M * (D / 8); i += THREADS) {
    const int item = i + thread_index;
    copies.copy(queries + item / (D / 8) * KW + item % (D / 8) * 8, q + line_of(item / (D / 8)) * D + item % (D / 8) * 8, true);
  }
}
load_keys(first, ids);
if (BUFFERS == 2) load_values(first, ids);
uint query[RT][D / 16][4];
if (!QS) {
  UNROLL
  for (int i = 0; i < RT * 2; i++) {
    const uint* source = reinterpret_cast<const uint*>(q + line_of(opaque(first_line) + i * 8) * D) + c;
    UNROLL
    for (int k = 0; k < D / 16; k++) {
      query[i / 2][k][i % 2] = source[k * 8];
      query[i / 2][k][2 + i % 2] = source[k * 8 + 4];
    }
  }
}

float m[RT * 2], l[RT * 2];  // of rows r and r + 8 of each 16
float acc[RT][DV / 8][4];
UNROLL
for (int i = 0; i < RT * 2; i++) {
  m[i] = NOTHING;
  l[i] = 0.0f;
}
UNROLL
for (int i = 0; i < RT * DV / 2; i++) acc[i / (DV / 2)][i / 4 % (DV / 8)][i % 4] = 0.0f;

for (int step = first; step <= last; step++) {
  // With one buffer, values are loaded while scores are computed, and the next keys after that. With two buffers, the
  // next step's keys and values are loaded during this step.
  wait();
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int next_ids = step < last ? look_up(step + 1) : 0;
  if (BUFFERS == 1) {
    load_values(step, ids);
  } else if (step < last) {
    load_keys(step + 1, next_ids);
    load_values(step + 1, next_ids);
  }
  const T* const stage = shared + (step - first) % BUFFERS * STAGE;

  float s[RT][KEYS / 8][4];
  UNROLL
  for (int i = 0; i < RT * KEYS / 2; i++) s[i / (KEYS / 2)][i / 4 % (KEYS / 8)][i % 4] = 0.0f;
  const T* const key = stage + (lane / 16 * 8 + lane % 8) * KW + lane / 8 % 2 * 8;
  UNROLL
  for (int k = 0; k < D / 16; k++) {
    if (QS) {
      UNROLL
      for (int i = 0; i < RT; i++) {
        const uint4 a = load_matrices(queries + ((warp * RT + i) * 16 + lane % 16) * KW + lane / 16 * 8 + k * 16);
        query[i][k][0] = a.x;
        query[i][k][1] = a.y;
        query[i][k][2] = a.z;
        query[i][k][3] = a.w;
      }
    }
    UNROLL
    for (int j = 0; j < KEYS / 16; j++) {
      const uint4 b = load_matrices(key + j * 16 * KW + k * 16);
      UNROLL
      for (int i = 0; i < RT; i++) {
        const auto& a = query[i][k];
        mma<T>(s[i][2 * j], a[0], a[1], a[2], a[3], b.x, b.y);
        mma<T>(s[i][2 * j + 1], a[0], a[1], a[2], a[3], b.z, b.w);
      }
    }
  }
  if (BUFFERS == 1) {
    wait();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (step < last) load_keys(step + 1, next_ids);
  }

  if (SOFTCAP) {
    UNROLL
    for (int i = 0; i < RT * KEYS / 2; i++) {
      // The hyperbolic tangent, with an error of about 1e-7.
      float& x = s[i / (KEYS / 2)][i / 4 % (KEYS / 8)][i % 4];
      const float e = metal::fast::exp2(metal::min(x * (params[0] / params[1] * 2.0f * LOG2E), 64.0f));
      x = (1.0f - metal::fast::divide(2.0f, 1.0f + e)) * (params[1] * LOG2E);
    }
  }
  if (step * KEYS + KEYS - 1 > origin || step * KEYS < first_seen(hi - 1)) {
    UNROLL
    for (int i = 0; i < RT * 2; i++) {
      const int own = origin + metal::min((opaque(first_line) + i * 8) / G, n_tokens - 1) - step * KEYS - c * 2;
      const int from = first_seen(own + step * KEYS + c * 2) - step * KEYS - c * 2;
      UNROLL
      for (int j = 0; j < KEYS / 4; j++) {
        const int token = j / 2 * 8 + j % 2;
        if (token > own || token < from) s[i / 2][j / 2][i % 2 * 2 + j % 2] = NOTHING;
      }
    }
  }
  float shrink[RT * 2];
  UNROLL
  for (int i = 0; i < RT * 2; i++) {
    float top = m[i];
    UNROLL
    for (int j = 0; j < KEYS / 4; j++) top = metal::max(top, s[i / 2][j / 2][i % 2 * 2 + j % 2]);
    top = metal::max(top, simd_shuffle_xor(top, 1));
    top = metal::max(top, simd_shuffle_xor(top, 2));
    // If a row has seen no token yet, score * gain - top * gain is a rounding error of huge numbers: weights could be
    // infinite.
    const float base = top == NOTHING ? 0.0f : top * gain;
    shrink[i] = metal::fast::exp2(metal::fma(m[i], gain, -base));
    m[i] = top;
    float sum = 0.0f;
    UNROLL
    for (int j = 0; j < KEYS / 4; j++) {
      float& x = s[i / 2][j / 2][i % 2 * 2 + j % 2];
      x = metal::fast::exp2(metal::fma(x, gain, -base));
      sum += x;
    }
    l[i] = metal::fma(l[i], shrink[i], sum);
  }
  // Most steps raise no maximum.
  bool grown = false;
  UNROLL
  for (int i = 0; i < RT * 2; i++) grown = grown || shrink[i] != 1.0f;
  if (simd_any(grown)) {
    UNROLL
    for (int i = 0; i < RT * DV / 2; i++) acc[i / (DV / 2)][i / 4 % (DV / 8)][i % 4] *= shrink[i / (DV / 2) * 2 + i / 2 % 2];
  }

  const T* const value = stage + KEYS * KW + lane % 16 * VW + lane / 16 * 8;
  UNROLL
  for (int u = 0; u < KEYS / 16; u++) {
    uint p[RT][4];
    UNROLL
    for (int i = 0; i < RT * 4; i++) {
      const auto& x = s[i / 4][u * 2 + i % 4 / 2];
      p[i / 4][i % 4] = pack_rounded<T>(x[i % 2 * 2], x[i % 2 * 2 + 1]);
    }
    UNROLL
    for (int v = 0; v < DV / 16; v++) {
      const uint4 b = load_transposed(value + u * 16 * VW + v * 16);
      UNROLL
      for (int i = 0; i < RT; i++) {
        mma<T>(acc[i][2 * v], p[i][0], p[i][1], p[i][2], p[i][3], b.x, b.y);
        mma<T>(acc[i][2 * v + 1], p[i][0], p[i][1], p[i][2], p[i][3], b.z, b.w);
      }
    }
  }
  ids = next_ids;
}

UNROLL
for (int i = 0; i < RT * 2; i++) {
  const int row = opaque(first_line) + i * 8;
  float sum = l[i] + simd_shuffle_xor(l[i], 1);
  sum += simd_shuffle_xor(sum, 2);
  float scale = metal::fast::divide(1.0f, sum);
  if (SINKS) {
    const float sink = static_cast<float>(sinks[kv_head * G + row % G]) * LOG2E;
    const float top = metal::max(m[i] * gain, sink);
    const float weight = metal::fast::exp2(m[i] * gain - top);
    scale = metal::fast::divide(weight, metal::fma(sum, weight, metal::fast::exp2(sink - top)));
  }
  if (row < n_tokens * G) {
    uint* target = reinterpret_cast<uint*>(out + line_of(row) * DV) + c;
    UNROLL
    for (int v = 0; v < DV / 8; v++) {
      const float* x = &acc[i / 2][v][i % 2 * 2];
      target[v * 4] = pack_rounded<T>(x[0] * scale, x[1] * scale);
    }
  }
}
