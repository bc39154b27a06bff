// Copy whole blocks of the pool onto others in place: block pairs[0][i] to block pairs[1][i]. No block may be both a
// source and a target.
// Grid: x = one thread per packet of 4 elements of a block (rounded up), y = pair.
const int n_kv = k_pool_shape[1];
const int n_pairs = pairs_shape[1];
const int pair = static_cast<int>(thread_position_in_grid.y);
const int64_t at = static_cast<int64_t>(thread_position_in_grid.x) * 4;
const int64_t source = pairs[pair];
const int64_t target = pairs[n_pairs + pair];
const int64_t k_size = static_cast<int64_t>(n_kv) * BS * D;
const int64_t v_size = static_cast<int64_t>(n_kv) * BS * DV;

if (pair == 0 && at == 0) {
  fence_out[0] = fence[0] + 1u;
}
auto k_target = const_cast<device T*>(k_pool);
auto v_target = const_cast<device T*>(v_pool);
if (at < k_size) {
  store_packet<T, 4>(k_target + target * k_size + at, load_packet<T, 4>(k_pool + source * k_size + at));
}
if (at < v_size) {
  store_packet<T, 4>(v_target + target * v_size + at, load_packet<T, 4>(v_pool + source * v_size + at));
}
