// CUDA only: out = silu(left) * right, with gated() of silu_gate.cuh. All of XD dimensions, contiguous.
// Grid: one thread per eight values.
int64_t size = 1;
UNROLL
for (int i = 0; i < XD; i++) {
  size *= left_shape[i];
}
const int64_t at = static_cast<int64_t>(thread_position_in_grid.x) * 8;
const bool aligned = is_aligned(left) && is_aligned(right);
if (aligned && at + 8 <= size) {
  const auto l = load_packet<T, 8>(left + at);
  const auto r = load_packet<T, 8>(right + at);
  uint pairs[4];
  UNROLL
  for (int i = 0; i < 4; i++) {
    const T low = gated(packet_value(l, 2 * i), packet_value(r, 2 * i));
    const T high = gated(packet_value(l, 2 * i + 1), packet_value(r, 2 * i + 1));
    pairs[i] = pack(low, high);
  }
  *reinterpret_cast<uint4*>(out + at) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
} else {
  for (int64_t i = at; i < at + 8 && i < size; i++) {
    out[i] = gated(static_cast<float>(left[i]), static_cast<float>(right[i]));
  }
}
