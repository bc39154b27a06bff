// CUDA only, goes before the body of narrow_matmul that has two matrices, for quantised ones; see narrow_quantized_tile.cuh.
const auto* const w = words;
const auto* const w1 = words1;
const auto* const matrix = w;
const T* const matrix_scales = scales;
const T* const matrix_biases = biases;
const T* const partner_scales = scales1;
const T* const partner_biases = biases1;
T* target = out;
const int depth = words_shape[1] / BITS * 32;
const int groups = scales_shape[1];
const int width = words_shape[0];
const int tile = threadgroup_position_in_grid.x;
