// CUDA only: a row of keys or values goes into a page as MLX's kernel for CUDA quantises it. Goes before prelude.cuh.
namespace mlx::core::cu {
// Eight of the warp's lanes for each group.
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
    float low = 3.0e38f, high = 0.0f;  // as there: a group of negative numbers has 0 in its range
    for (int i = 0; i < SHARE; i++) {
      x[i] = static_cast<float>(row[dim + i]);
      low = ::fminf(low, x[i]);
      high = ::fmaxf(high, x[i]);
    }
    for (int lanes = 1; lanes < 8; lanes *= 2) {
      low = ::fminf(low, __shfl_xor_sync(0xffffffffu, low, lanes));
      high = ::fmaxf(high, __shfl_xor_sync(0xffffffffu, high, lanes));
    }
    float scale = ::fmaxf((high - low) / MOST, 1e-7f);
    const bool is_low = ::fabsf(low) > ::fabsf(high);
    scale = is_low ? scale : -scale;
    const float edge = is_low ? low : high;
    const float steps = ::roundf(edge / scale);
    const float bias = steps == 0.0f ? 0.0f : edge;
    scale = steps == 0.0f ? scale : edge / steps;
    if (live) {
      if (lane % 8 == 0) {
        factors[group] = static_cast<T>(scale);
        factors[GROUPS_OF_ROW + group] = static_cast<T>(bias);
      }
      for (int i = 0; i < SHARE; i += 4) {
        unsigned codes = 0;
        for (int j = 0; j < 4; j++) {
          const unsigned code = static_cast<unsigned char>(static_cast<int>(::fminf(::roundf((x[i + j] - bias) / scale), MOST)));
          codes |= code << j * BITS;
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
}  // namespace mlx::core::cu
