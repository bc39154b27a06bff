// What kernels need beyond MSL and MLX's own preamble: on Metal, words and loads that prelude.cuh defines for CUDA; then,
// for both, partitions, and the quantisation of pages.
#define LOG2E 1.44269504088896341f  // of scores, for powers of two
#if METAL
#define FUNCTION inline
#define GLOBAL device  // address space of inputs and outputs
#define UNROLL _Pragma("clang loop unroll(full)")
// N elements of T loaded together; converted only when they are used.
template <typename T, int N>
struct Packet {
  metal::vec<T, 4> part[N / 4];
};

template <typename T, int N, typename P>
inline Packet<T, N> load_packet(P source) {
  Packet<T, N> packet;
  UNROLL
  for (int i = 0; i < N / 4; i++) {
    packet.part[i] = *reinterpret_cast<const device metal::vec<T, 4>*>(source + 4 * i);
  }
  return packet;
}

template <typename T, int N>
inline Packet<T, N> zero_packet() {
  Packet<T, N> packet;
  UNROLL
  for (int i = 0; i < N / 4; i++) {
    packet.part[i] = metal::vec<T, 4>(static_cast<T>(0.0f));
  }
  return packet;
}

template <typename T, int N, typename P>
inline void store_packet(P target, Packet<T, N> packet) {
  UNROLL
  for (int i = 0; i < N / 4; i++) {
    *reinterpret_cast<device metal::vec<T, 4>*>(target + 4 * i) = packet.part[i];
  }
}

template <typename T, int N>
inline float packet_value(Packet<T, N> packet, int i) {
  return static_cast<float>(packet.part[i / 4][i % 4]);
}
#if QUANTIZED

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
#endif
#endif
#if PARTITIONS

// The partitions of a row that sees the tokens from `begin` to `end` - 1: tokens of each, where the first one begins, and
// how many hold a visible token. They depend only on what the row sees, never on the rest of the batch.
struct Partitions {
  int size;
  int origin;
  int count;
};

template <int PART, int SPAN, int FIRST>
FUNCTION Partitions partitions_of(int begin, int end) {
  // The first one begins at a multiple of a chunk. If it began PART tokens or more before the first visible token, it
  // could hold none: no thread group would write its output, and merge_partitions would read it.
  constexpr int ALIGNMENT = PART < 64 ? PART : 64;
  Partitions partitions;
  partitions.origin = begin / ALIGNMENT * ALIGNMENT;
  partitions.size = PART;
  while (end - begin > partitions.size / PART * partitions.size * SPAN) {
    partitions.size *= 2;
  }
  // A row that ends at most FIRST tokens after its first partition begins has only that partition. A launch with only
  // such rows needs no merge.
  if (FIRST > 0 && end - partitions.origin <= FIRST) {
    partitions.size = FIRST;
  }
  partitions.count = begin < end ? (end - partitions.origin + partitions.size - 1) / partitions.size : 0;
  return partitions;
}

// Store one dim of a partition's result, the largest score and the sum of weights of its tokens. `at` counts the
// partitions of all lines. A line's only partition has its outputs.
template <typename O, int DV, bool SINGLE, bool SINKS, typename Out, typename Stats>
FUNCTION void store_result(Out out, Stats stats, int64_t at, int dim, float top, float total, float o, float sink) {
  if (dim == 0) {
    stats[at * 2] = top;
    stats[at * 2 + 1] = total;
  }
  if (SINGLE) {
    // Same operations in the same order as merge_partitions with one live partition, so the bits are equal.
    const float all = SINKS ? metal::max(top, sink) : top;
    const float weight = metal::fast::exp2(top - all);
    const float denominator = metal::fma(total, weight, SINKS ? metal::fast::exp2(sink - all) : 0.0f);
    o = metal::fma(o, weight, 0.0f) / denominator;
  }
  out[at * DV + dim] = static_cast<O>(o);
}

// Look up the ids of the BLOCKS blocks of a chunk. A block outside the visible tokens [lo, hi) is replaced by the
// nearest one inside. The type of the table is a template parameter: on Metal it may be in either address space.
template <int CHUNK, int BS, int BLOCKS, typename Table>
FUNCTION void look_up_blocks(Table table, int chunk, int lo, int hi, thread int* blocks) {
  UNROLL
  for (int i = 0; i < BLOCKS; i++) {
    blocks[i] = table[metal::min(metal::max(chunk * CHUNK / BS + i, lo / BS), (hi - 1) / BS)];
  }
}
#endif
#if QUANTIZED

// Load one word, or two that are aligned to 8 bytes.
template <int N, typename P>
FUNCTION void load_words(P source, thread uint* words) {
  if (N == 1) {
    words[0] = source[0];
  } else {
    const uint2 pair = *reinterpret_cast<const GLOBAL uint2*>(source);
    words[0] = pair.x;
    words[N - 1] = pair.y;
  }
}

// Quantisation of groups, as in MLX's GPU kernels.
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

// Quantise a group of a row of DIM values and store it in slot `slot` of a page (PageShape). A simdgroup does so; each
// lane has PER consecutive values, and 32 / (BITS * PER) lanes share a word. Codes are computed with this scale and
// bias; the stored ones are rounded.
template <typename T, int BITS, int DIM, int GS, int BS, typename Row, typename Page>
FUNCTION void quantize_group(Row row, int64_t stride, Page page, int slot, int group, int lane) {
  constexpr int PER = GS / 32;
  constexpr int CODES = DIM * BITS / 32;  // words of a row's codes
  constexpr int SHARERS = 32 / (BITS * PER);
  const int first = group * GS + lane * PER;
  float x[PER];
  float low = float_of(0x7f800000u);
  float high = 0.0f;
  UNROLL
  for (int i = 0; i < PER; i++) {
    x[i] = static_cast<float>(row[(first + i) * stride]);
    low = metal::min(low, x[i]);
    high = metal::max(high, x[i]);
  }
  const Affine affine = affine_of(-simd_max(-low), simd_max(high), BITS);
  uint word = 0u;
  UNROLL
  for (int i = 0; i < PER; i++) {
    const float code = metal::min(metal::round((x[i] - affine.bias) / affine.scale), static_cast<float>((1 << BITS) - 1));
    word |= static_cast<uint>(code) << (BITS * (lane % SHARERS * PER + i));
  }
  for (int o = 1; o < SHARERS; o *= 2) {
    word |= simd_shuffle_xor(word, static_cast<ushort>(o));
  }
  if (first * BITS % 32 == 0) {
    page[slot * CODES + first * BITS / 32] = word;
  }
  if (lane == 0) {
    auto factors = reinterpret_cast<GLOBAL T*>(page + BS * CODES) + slot * (2 * DIM / GS);
    factors[group] = static_cast<T>(affine.scale);
    factors[DIM / GS + group] = static_cast<T>(affine.bias);
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
#endif
