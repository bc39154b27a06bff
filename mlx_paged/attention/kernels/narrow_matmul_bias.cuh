// CUDA only: out = x w^T + bias; see narrow_matmul_tile.cuh.
const T* const matrix = w;
const T* const partner = w;
T* target = out;
const int depth = w_shape[1];
const int width = w_shape[0];
const int tile = threadgroup_position_in_grid.x;
auto finish = [&](int, int column, float sum, float) { return static_cast<T>(sum + static_cast<float>(bias[column])); };
