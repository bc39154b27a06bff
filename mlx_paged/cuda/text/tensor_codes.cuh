// CUDA only: codes of quantised keys and values as factors for the tensor cores.
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
