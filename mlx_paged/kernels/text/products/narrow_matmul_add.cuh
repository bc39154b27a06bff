// CUDA only: out = residual + x w^T, the product rounded before it is added; see narrow_matmul_tile.cuh.
const auto* const partner = w;
auto finish = [&](int row, int column, float sum, float) {
  const float before = static_cast<float>(residual[static_cast<int64_t>(row) * width + column]);
  return static_cast<T>(before + static_cast<float>(static_cast<T>(sum)));
};
