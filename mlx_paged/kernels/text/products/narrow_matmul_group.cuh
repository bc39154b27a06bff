// CUDA only: out = x w^T, out1 = x w1^T, out2 = x w2^T; see narrow_matmul_tile.cuh. The grid is as long as all tiles of the
// matrices, one after the other; it may end before the third.
const int depth = w_shape[1];
const int tiles0 = (w_shape[0] + COLUMNS - 1) / COLUMNS;
const int tiles1 = (w1_shape[0] + COLUMNS - 1) / COLUMNS;
const int place = threadgroup_position_in_grid.x;
const int which = place < tiles0 ? 0 : place < tiles0 + tiles1 ? 1 : 2;
const T* const matrix = which == 0 ? w : which == 1 ? w1 : w2;
const T* const partner = matrix;
T* const target = which == 0 ? out : which == 1 ? out1 : out2;
const int width = which == 0 ? w_shape[0] : which == 1 ? w1_shape[0] : w2_shape[0];
const int tile = place - (which == 0 ? 0 : which == 1 ? tiles0 : tiles0 + tiles1);
auto finish = [&](int, int, float sum, float) { return static_cast<T>(sum); };
