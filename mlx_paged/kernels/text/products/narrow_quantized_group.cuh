// CUDA only: out = x w^T, out1 = x w1^T, out2 = x w2^T with quantised matrices; see narrow_quantized_tile.cuh. The grid is as
// long as all tiles of the matrices, one after the other; it may end before the third.
const int depth = words_shape[1] / BITS * 32;
const int groups = scales_shape[1];
const int tiles0 = (words_shape[0] + COLUMNS - 1) / COLUMNS;
const int tiles1 = (words1_shape[0] + COLUMNS - 1) / COLUMNS;
const int place = threadgroup_position_in_grid.x;
const int which = place < tiles0 ? 0 : place < tiles0 + tiles1 ? 1 : 2;
const auto* const matrix = which == 0 ? words : which == 1 ? words1 : words2;
const T* const matrix_scales = which == 0 ? scales : which == 1 ? scales1 : scales2;
const T* const matrix_biases = which == 0 ? biases : which == 1 ? biases1 : biases2;
const auto* const partner = matrix;
const T* const partner_scales = matrix_scales;
const T* const partner_biases = matrix_biases;
T* const target = which == 0 ? out : which == 1 ? out1 : out2;
const int width = which == 0 ? words_shape[0] : which == 1 ? words1_shape[0] : words2_shape[0];
const int tile = place - (which == 0 ? 0 : which == 1 ? tiles0 : tiles0 + tiles1);
auto finish = [&](int, int, float sum, float) { return static_cast<T>(sum); };
