// CUDA only: out = silu(x w^T) * (x w1^T), with gated() of silu_gate.cuh; see narrow_matmul_tile.cuh.
const auto* const partner = w1;
auto finish = [&](int, int, float sum, float partner_sum) { return gated(sum, partner_sum); };
