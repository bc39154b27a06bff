// Both dialects: groups of quantised values, as MLX's kernels make them on a GPU.
struct Affine {
  float scale;
  float bias;
};

// Of a group whose values lie between low and high, and 0 below high: the one farther from 0 is met exactly.
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

// A simdgroup quantises a group, of which each lane has PER values in a row. Returns the word with this lane's codes, which
// 32 / (bits * PER) lanes share. Codes are of the scale as it is here; what is kept is rounded.
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

// A simdgroup quantises a group and stores it; codes and factors are those of the group's row. Pointers are templates: a
// buffer has an address space on Metal.
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

// Where bit `bit` of a word stands in its half of the word.
#define PLACE(bit) ((bit) % 16)
// The code at a bit of a word, times 2 to the power of its place: as the last bits of a float of exponent 23 it is a float
// without a conversion.
template <int BITS>
FUNCTION float code_in_place(uint word, int bit) {
  const uint code = word >> (bit / 16 * 16) & (((1u << BITS) - 1u) << PLACE(bit));
  return float_of(code | 0x4b000000u) - 8388608.0f;
}
