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
