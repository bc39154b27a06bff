// Scatter new key and value rows into the pool, in place. k and v are [batch, kv heads, length, head_dim] with any
// strides. Row n = batch * length + position goes to slot slots[n] = block * BS + offset; it is skipped if slots[n] <
// 0.
// Grid: x = row, KV head; one simdgroup each. (CUDA allows at most 65,535 groups in y; a long prompt may have more
// rows.)
const int n_kv = k_pool_shape[1];
const int length = k_shape[2];
const int head = static_cast<int>(thread_position_in_grid.x) / 32 % n_kv;
const int row = static_cast<int>(thread_position_in_grid.x) / 32 / n_kv;
const int lane = static_cast<int>(thread_position_in_grid.x) % 32;
const int64_t slot = static_cast<int64_t>(static_cast<S>(slots[row]));  // S: each type of slots has its own text

if (head + row + lane == 0) {
  fence_out[0] = fence[0] + 1u;
}
if (slot >= 0) {
  // MLX does not know that a kernel writes to its inputs: only the fence orders this store with every other use.
  auto k_target = const_cast<device T*>(k_pool);
  auto v_target = const_cast<device T*>(v_pool);
  const int64_t at = (slot / BS * n_kv + head) * BS + slot % BS;
  const int64_t k_from = row / length * k_strides[0] + head * k_strides[1] + row % length * k_strides[2];
  const int64_t v_from = row / length * v_strides[0] + head * v_strides[1] + row % length * v_strides[2];
  for (int dim = lane; dim < D; dim += 32) {
    k_target[at * D + dim] = k[k_from + dim * k_strides[3]];
  }
  for (int dim = lane; dim < DV; dim += 32) {
    v_target[at * DV + dim] = v[v_from + dim * v_strides[3]];
  }
}
