//// codes
// Metal: what the kernels for quantised pages need besides the prelude.

inline float float_of(uint bits) { return as_type<float>(bits); }

// Return the value of a code, as MLX's dequantising kernel computes it.
template <typename T>
inline T dequantized(T scale, uint code, T bias) {
  return static_cast<T>(scale * static_cast<uint8_t>(code) + bias);
}

template <typename T, int N>
inline void set_packet(thread Packet<T, N>& packet, int i, T value) {
  packet.part[i / 4][i % 4] = value;
}

// Load one word, or two that are aligned to 8 bytes.
template <int N, typename P>
inline void load_words(P source, thread uint* words) {
  if (N == 1) {
    words[0] = source[0];
  } else {
    const uint2 pair = *reinterpret_cast<const device uint2*>(source);
    words[0] = pair.x;
    words[N - 1] = pair.y;
  }
}
//// groups
// Both dialects: quantisation of groups, as in MLX's GPU kernels.
struct Affine {
  float scale;
  float bias;
};

// Return the scale and bias of a group with values in [low, high], where high >= 0. Of low and high, the one farther
// from 0 is represented exactly.
FUNCTION Affine affine_of(float low, float high, int bits) {
  const float most = static_cast<float>((1 << bits) - 1);
  const float step = metal::max((high - low) / most, 1e-7f);
  const bool is_low = metal::max(low, -low) > high;
  const float scale = is_low ? step : -step;
  const float edge = is_low ? low : high;
  const float steps = metal::round(edge / scale);
  const bool is_zero = steps == 0.0f;
  Affine affine;
  affine.scale = is_zero ? scale : edge / steps;
  affine.bias = is_zero ? 0.0f : edge;
  return affine;
}

// Quantise a group with a simdgroup, of which each lane has PER consecutive values. Return the word with this lane's
// codes; 32 / (bits * PER) lanes share a word. Codes are computed with this scale and bias; the stored ones are
// rounded.
template <int PER>
FUNCTION uint quantized_word(const thread float* x, int bits, int lane, thread Affine& affine) {
  float low = float_of(0x7f800000u);
  float high = 0.0f;
  UNROLL
  for (int i = 0; i < PER; i++) {
    low = metal::min(low, x[i]);
    high = metal::max(high, x[i]);
  }
  low = -simd_max(-low);
  high = simd_max(high);
  affine = affine_of(low, high, bits);
  const int sharers = 32 / (bits * PER);
  const float most = static_cast<float>((1 << bits) - 1);
  uint word = 0u;
  UNROLL
  for (int i = 0; i < PER; i++) {
    const uint code = static_cast<uint>(metal::min(metal::round((x[i] - affine.bias) / affine.scale), most));
    word |= code << (bits * (lane % sharers * PER + i));
  }
  for (int o = 1; o < sharers; o *= 2) {
    word |= simd_shuffle_xor(word, static_cast<ushort>(o));
  }
  return word;
}

// Quantise a group with a simdgroup and store it in the row that codes and factors point to. Types of pointers are
// template parameters: on Metal they have an address space.
template <typename T, int PER, typename Words, typename Factors>
FUNCTION void store_group(const thread float* x, int bits, int group, int groups, int lane, Words codes, Factors factors) {
  Affine affine;
  const uint word = quantized_word<PER>(x, bits, lane, affine);
  const int first = (group * 32 + lane) * PER;
  if (first * bits % 32 == 0) {
    codes[first * bits / 32] = word;
  }
  if (lane == 0) {
    factors[group] = static_cast<T>(affine.scale);
    factors[groups + group] = static_cast<T>(affine.bias);
  }
}

// The place of bit `bit` of a word in its half of the word.
#define PLACE(bit) ((bit) % 16)
// Return the code at a bit of a word, times 2 to the power of its place: as the low bits of a float of exponent 23 it
// needs no conversion.
template <int BITS>
FUNCTION float code_in_place(uint word, int bit) {
  const uint code = word >> (bit / 16 * 16) & (((1u << BITS) - 1u) << PLACE(bit));
  return float_of(code | 0x4b000000u) - 8388608.0f;
}
//// page_words
  // Pages of quantised keys and values. A packet of VEC values is part of one group, whose scale and bias stay outside
  // the products: q . k = scale * (q . codes) + bias * sum(q). Codes stay in their place in their word, where they
  // count code times a power of two. The query is divided by that power at the start, the accumulators at the end.
  constexpr int KW = VEC * KBITS / 32;
  constexpr int VW = VEC * VBITS / 32;
//// page_sizes
  constexpr int K_CODES = D * KBITS / 32;
  constexpr int V_CODES = DV * VBITS / 32;
  constexpr int K_GROUPS = D / GS;
  constexpr int V_GROUPS = DV / GS;
  constexpr int FACTOR = static_cast<int>(sizeof(T));
  constexpr int K_PAGE = BS * (K_CODES + K_GROUPS * FACTOR / 2);
  constexpr int V_PAGE = BS * (V_CODES + V_GROUPS * FACTOR / 2);
//// newest
  // Each pool is written and read through one pointer: a compiler may assume that memory reached through one buffer
  // argument, or through a const one, is not written through another.
  auto k_pages = const_cast<device uint*>(k_pool);
  auto v_pages = const_cast<device uint*>(v_pool);
  if (fresh >= lo && fresh < hi) {
    constexpr int PER = GS / 32;
    const int64_t block = tables[sequence * max_blocks + fresh / BS];
    const int offset = fresh % BS;
    for (int task = sg; task < K_GROUPS + V_GROUPS; task += SG) {
      float x[PER];
      if (task < K_GROUPS) {
        auto source = k_new + fresh_row * D + task * GS + lane * PER;
        UNROLL
        for (int i = 0; i < PER; i++) {
          x[i] = static_cast<float>(source[i]);
        }
        auto page = k_pages + (block * n_kv + kv_head) * K_PAGE;
        auto factors = reinterpret_cast<device T*>(page + BS * K_CODES) + offset * 2 * K_GROUPS;
        store_group<T, PER>(x, KBITS, task, K_GROUPS, lane, page + offset * K_CODES, factors);
      } else {
        auto source = v_new + fresh_row * DV + (task - K_GROUPS) * GS + lane * PER;
        UNROLL
        for (int i = 0; i < PER; i++) {
          x[i] = static_cast<float>(source[i]);
        }
        auto page = v_pages + (block * n_kv + kv_head) * V_PAGE;
        auto factors = reinterpret_cast<device T*>(page + BS * V_CODES) + offset * 2 * V_GROUPS;
        store_group<T, PER>(x, VBITS, task - K_GROUPS, V_GROUPS, lane, page + offset * V_CODES, factors);
      }
    }
    // The token is read below as its page holds it, so wait for the stores of this thread group.
    threadgroup_barrier(mem_flags::mem_device);
  }

//// quantized_write
// Quantise new key and value rows into pages of the pool, in place (PageShape describes a page). k, v and slots as in
// write_slots.
// Grid: x = row, KV head, keys or values; one simdgroup each.
constexpr int PER = GS / 32;
const int n_kv = k_pool_shape[1];
const int length = k_shape[2];
const int item = static_cast<int>(thread_position_in_grid.x) / 32;
const int lane = static_cast<int>(thread_position_in_grid.x) % 32;
const bool is_value = item % 2 != 0;
const int head = item / 2 % n_kv;
const int row = item / 2 / n_kv;
const int64_t slot = static_cast<int64_t>(static_cast<S>(slots[row]));  // S: each type of slots has its own text

if (item + lane == 0) {
  fence_out[0] = fence[0] + 1u;
}
if (slot >= 0) {
  const int bits = is_value ? VBITS : KBITS;
  const int groups = is_value ? DV / GS : D / GS;
  const int code_words = groups * GS * bits / 32;
  const int64_t page_words = BS * (code_words + 2 * groups * static_cast<int>(sizeof(T)) / 4);
  const int offset = static_cast<int>(slot % BS);
  // MLX does not know that a kernel writes to its inputs: only the fence orders this store with every other use.
  auto page = const_cast<device uint*>(is_value ? v_pool : k_pool) + (slot / BS * n_kv + head) * page_words;
  auto codes = page + offset * code_words;
  auto factors = reinterpret_cast<device T*>(page + BS * code_words) + offset * 2 * groups;
  auto source = is_value ? v : k;
  const int64_t batch_stride = is_value ? v_strides[0] : k_strides[0];
  const int64_t head_stride = is_value ? v_strides[1] : k_strides[1];
  const int64_t row_stride = is_value ? v_strides[2] : k_strides[2];
  const int64_t stride = is_value ? v_strides[3] : k_strides[3];
  const int64_t from = row / length * batch_stride + head * head_stride + row % length * row_stride;
  for (int group = 0; group < groups; group++) {
    const int first = group * GS + lane * PER;
    float x[PER];
    UNROLL
    for (int i = 0; i < PER; i++) {
      x[i] = static_cast<float>(source[from + (first + i) * stride]);
    }
    store_group<T, PER>(x, bits, group, groups, lane, codes, factors);
  }
}
//// quantized_gather
// Dequantise the token range [span[0], span[0] + span[1]) of one block table into contiguous [kv heads, length,
// head_dim].
// Grid: x = one thread per packet of 4 values of one head's rows (rounded up), y = KV head, z = keys or values.
constexpr int WIDE = (D > DV ? D : DV) / 4;
const int n_kv = k_pool_shape[1];
const int head = static_cast<int>(thread_position_in_grid.y);
const bool is_value = thread_position_in_grid.z != 0;
const int64_t item = static_cast<int64_t>(thread_position_in_grid.x);
const int64_t i = item / WIDE;
const int first = static_cast<int>(item % WIDE) * 4;
const int length = span[1];
const int dim = is_value ? DV : D;

if (head == 0 && item == 0 && !is_value) {
  fence_out[0] = fence[0] + 1u;
}
if (i < length && first < dim) {
  const int bits = is_value ? VBITS : KBITS;
  const int groups = dim / GS;
  const int code_words = dim * bits / 32;
  const int64_t page_words = BS * (code_words + 2 * groups * static_cast<int>(sizeof(T)) / 4);
  const int64_t position = span[0] + i;
  const int64_t block = blocks[position / BS];
  const int offset = static_cast<int>(position % BS);
  auto page = (is_value ? v_pool : k_pool) + (block * n_kv + head) * page_words;
  auto factors = reinterpret_cast<const device T*>(page + BS * code_words) + offset * 2 * groups;
  const uint word = page[offset * code_words + first * bits / 32] >> (first * bits % 32);
  const T scale = factors[first / GS];
  const T bias = factors[groups + first / GS];
  const uint most = (1u << bits) - 1u;
  Packet<T, 4> packet;
  UNROLL
  for (int j = 0; j < 4; j++) {
    set_packet<T, 4>(packet, j, dequantized(scale, word >> (bits * j) & most, bias));
  }
  store_packet<T, 4>((is_value ? v_out : k_out) + (static_cast<int64_t>(head) * length + i) * dim + first, packet);
}
//// write_rows
// Scatter quantised rows into pages, unchanged. k and v are [batch, kv heads, length, D or DV words]; the first KC or
// VC words of a row are codes. slots as in write_slots.
// Grid: x = row, KV head, keys or values; one simdgroup each.
const int n_kv = k_pool_shape[1];
const int length = k_shape[2];
const int item = static_cast<int>(thread_position_in_grid.x) / 32;
const int lane = static_cast<int>(thread_position_in_grid.x) % 32;
const bool is_value = item % 2 != 0;
const int head = item / 2 % n_kv;
const int row = item / 2 / n_kv;
const int64_t slot = static_cast<int64_t>(static_cast<S>(slots[row]));  // S: each type of slots has its own text

if (item + lane == 0) {
  fence_out[0] = fence[0] + 1u;
}
if (slot >= 0) {
  const int words = is_value ? DV : D;
  const int code_words = is_value ? VC : KC;
  const int offset = static_cast<int>(slot % BS);
  auto page = const_cast<device T*>(is_value ? v_pool : k_pool) + (slot / BS * n_kv + head) * (BS * words);
  auto source = (is_value ? v : k) + ((static_cast<int64_t>(row / length) * n_kv + head) * length + row % length) * words;
  for (int i = lane; i < words; i += 32) {
    const int rest = BS * code_words + offset * (words - code_words) + i - code_words;
    page[i < code_words ? offset * code_words + i : rest] = source[i];
  }
}
//// gather_rows
// Copy the quantised rows of the token range [span[0], span[0] + span[1]) of one block table, unchanged, into
// contiguous [kv heads, length, D or DV words]. The first KC or VC words of a row are codes.
// Grid: x = one thread per word of one head's rows (rounded up), y = KV head, z = keys or values.
constexpr int WIDE = D > DV ? D : DV;
const int n_kv = k_pool_shape[1];
const int head = static_cast<int>(thread_position_in_grid.y);
const bool is_value = thread_position_in_grid.z != 0;
const int64_t item = static_cast<int64_t>(thread_position_in_grid.x);
const int64_t i = item / WIDE;
const int word = static_cast<int>(item % WIDE);
const int length = span[1];
const int words = is_value ? DV : D;

if (head == 0 && item == 0 && !is_value) {
  fence_out[0] = fence[0] + 1u;
}
if (i < length && word < words) {
  const int64_t position = span[0] + i;
  const int64_t block = blocks[position / BS];
  const int offset = static_cast<int>(position % BS);
  const int code_words = is_value ? VC : KC;
  const int rest = BS * code_words + offset * (words - code_words) + word - code_words;
  auto page = (is_value ? v_pool : k_pool) + (block * n_kv + head) * (BS * words);
  (is_value ? v_out : k_out)[(static_cast<int64_t>(head) * length + i) * words + word] =
      page[word < code_words ? offset * code_words + word : rest];
}
