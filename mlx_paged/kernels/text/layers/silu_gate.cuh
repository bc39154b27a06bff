// CUDA only: silu(gate) * up, rounded wherever MLX's operations round.
constexpr float LOG2E = 1.44269504088896341f;
auto rounded = [](float value) { return static_cast<float>(static_cast<T>(value)); };
auto gated = [&](float gate_value, float up_value) {
  const float gate = rounded(gate_value);
  const float power = rounded(metal::fast::exp2((gate < 0.0f ? -gate : gate) * LOG2E));
  const float tail = rounded(1.0f / rounded(1.0f + power));
  const float sigmoid = gate < 0.0f ? tail : rounded(1.0f - tail);
  return static_cast<T>(rounded(gate * sigmoid) * rounded(up_value));
};
