// CUDA only, goes before the bodies of narrow_matmul that have one result; see narrow_matmul_tile.cuh.
const T* const matrix = w;
T* target = out;
const int depth = w_shape[1];
const int width = w_shape[0];
const int tile = threadgroup_position_in_grid.x;
