// Copy the quantised rows of the token range [span[0], span[0] + span[1]) of one block table, unchanged, into
// contiguous [kv heads, length, D or DV words]. The first KC or VC words of a row are codes.
// Grid: x = one thread per word of one head's rows (rounded up), y = KV head, z = keys or values.
constexpr int WIDE = D > DV ? D : DV;
const int n_kv = k_pool_shape[1];
const int head = static_cast<int>(thread_position_in_grid.y);
const bool is_value = thread_position_in_grid.z != 0;
const int64_t item = static_cast<int64_t>(thread_position_in_grid.x);
const int64_t i = item / WIDE;
const int word = static_cast<int>(item % WIDE);
const int length = span[1];
const int words = is_value ? DV : D;

if (head == 0 && item == 0 && !is_value) {
  fence_out[0] = fence[0] + 1u;
}
if (i < length && word < words) {
  const int64_t position = span[0] + i;
  const int64_t block = blocks[position / BS];
  const int offset = static_cast<int>(position % BS);
  const int code_words = is_value ? VC : KC;
  const int rest = BS * code_words + offset * (words - code_words) + word - code_words;
  auto page = (is_value ? v_pool : k_pool) + (block * n_kv + head) * (BS * words);
  (is_value ? v_out : k_out)[(static_cast<int64_t>(head) * length + i) * words + word] =
      page[word < code_words ? offset * code_words + word : rest];
}
