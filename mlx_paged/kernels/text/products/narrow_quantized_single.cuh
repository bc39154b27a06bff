// CUDA only, goes before the bodies of narrow_matmul that have one matrix, for a quantised one; see narrow_quantized_tile.cuh.
const auto* const w = words;
const auto* const matrix = w;
const T* const matrix_scales = scales;
const T* const matrix_biases = biases;
const T* const partner_scales = scales;
const T* const partner_biases = biases;
T* target = out;
const int depth = words_shape[1] / BITS * 32;
const int groups = scales_shape[1];
const int width = words_shape[0];
const int tile = threadgroup_position_in_grid.x;
