// CUDA only: out = x w^T; see narrow_matmul_tile.cuh.
const auto* const partner = w;
auto finish = [&](int, int, float sum, float) { return static_cast<T>(sum); };
