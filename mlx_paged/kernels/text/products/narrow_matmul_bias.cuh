// CUDA only: out = x w^T + bias; see narrow_matmul_tile.cuh.
const auto* const partner = w;
auto finish = [&](int, int column, float sum, float) { return static_cast<T>(sum + static_cast<float>(bias[column])); };
