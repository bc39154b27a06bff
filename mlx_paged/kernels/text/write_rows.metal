// Scatter quantised rows into pages, unchanged. k and v are [batch, kv heads, length, D or DV words]; the first KC or
// VC words of a row are codes. slots as in write_slots.
// Grid: x = row, KV head, keys or values; one simdgroup each.
const int n_kv = k_pool_shape[1];
const int length = k_shape[2];
const int item = static_cast<int>(thread_position_in_grid.x) / 32;
const int lane = static_cast<int>(thread_position_in_grid.x) % 32;
const bool is_value = item % 2 != 0;
const int head = item / 2 % n_kv;
const int row = item / 2 / n_kv;
const int64_t slot = static_cast<int64_t>(static_cast<S>(slots[row]));  // S: each type of slots has its own text

if (item + lane == 0) {
  fence_out[0] = fence[0] + 1u;
}
if (slot >= 0) {
  const int words = is_value ? DV : D;
  const int code_words = is_value ? VC : KC;
  const int offset = static_cast<int>(slot % BS);
  auto page = const_cast<device T*>(is_value ? v_pool : k_pool) + (slot / BS * n_kv + head) * (BS * words);
  auto source = (is_value ? v : k) + ((static_cast<int64_t>(row / length) * n_kv + head) * length + row % length) * words;
  for (int i = lane; i < words; i += 32) {
    const int rest = BS * code_words + offset * (words - code_words) + i - code_words;
    page[i < code_words ? offset * code_words + i : rest] = source[i];
  }
}
