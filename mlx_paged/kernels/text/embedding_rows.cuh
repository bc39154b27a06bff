// CUDA only: out[i] = table[tokens[i]], row by row. A negative id counts from the end, as in MLX.
// Grid: x = one thread group, which copies a row; y = token.
const int64_t width = table_shape[1];
const int64_t token = static_cast<int64_t>(tokens[threadgroup_position_in_grid.y]);
const T* const from = table + (token < 0 ? token + table_shape[0] : token) * width;
T* const to = out + static_cast<int64_t>(threadgroup_position_in_grid.y) * width;
constexpr int EACH = 16 / sizeof(T);
const int64_t whole = is_aligned(from) && is_aligned(to) ? width / EACH : 0;
for (int64_t i = thread_position_in_threadgroup.x; i < whole; i += threads_per_threadgroup.x) {
  store_packet<T, EACH>(to + i * EACH, load_packet<T, EACH>(from + i * EACH));
}
for (int64_t i = whole * EACH + thread_position_in_threadgroup.x; i < width; i += threads_per_threadgroup.x) {
  to[i] = from[i];
}
