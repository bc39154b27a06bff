// CUDA only: out = silu(x w^T) * (x w1^T), rounded wherever MLX's operations round; see narrow_matmul_tile.cuh.
const auto* const partner = w1;
constexpr float LOG2E = 1.44269504088896341f;
auto rounded = [](float value) { return static_cast<float>(static_cast<T>(value)); };
auto finish = [&](int, int, float sum, float partner_sum) {
  const float gate = rounded(sum);
  const float power = rounded(metal::exp2((gate < 0.0f ? -gate : gate) * LOG2E));
  const float tail = rounded(1.0f / rounded(1.0f + power));
  const float sigmoid = gate < 0.0f ? tail : rounded(1.0f - tail);
  return static_cast<T>(rounded(gate * sigmoid) * rounded(partner_sum));
};
