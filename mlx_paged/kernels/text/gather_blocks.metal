// Copy the token range [span[0], span[0] + span[1]) of one block table into contiguous [kv heads, length, head_dim].
// Grid: x = one thread per packet of 4 elements of one head's rows (rounded up), y = KV head.
constexpr int KP = D / 4;
constexpr int VP = DV / 4;
constexpr int WIDE = KP > VP ? KP : VP;
const int n_kv = k_pool_shape[1];
const int head = static_cast<int>(thread_position_in_grid.y);
const int64_t item = static_cast<int64_t>(thread_position_in_grid.x);
const int64_t i = item / WIDE;
const int packet = static_cast<int>(item % WIDE);
const int length = span[1];

if (head == 0 && item == 0) {
  fence_out[0] = fence[0] + 1u;
}
if (i < length) {
  const int64_t position = span[0] + i;
  const int64_t block = blocks[position / BS];
  const int64_t from = (block * n_kv + head) * BS + position % BS;
  const int64_t to = static_cast<int64_t>(head) * length + i;
  if (packet < KP) {
    store_packet<T, 4>(k_out + to * D + packet * 4, load_packet<T, 4>(k_pool + from * D + packet * 4));
  }
  if (packet < VP) {
    store_packet<T, 4>(v_out + to * DV + packet * 4, load_packet<T, 4>(v_pool + from * DV + packet * 4));
  }
}
