// CUDA only: quantise a row of keys or values into a page, with the bits of quantized_write. A group takes eight of the
// warp's lanes.
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
