// Of latent_prefill_tensor: where the head's keys and values lie, in slots that lie next to each other in each head. What
// is rotated of a key, its last DR values, all heads share.
const int64_t head_slot = static_cast<int64_t>(kv_head) * k_pool_shape[2];
const T* k_head = k_pool + head_slot * (D - DR);
const T* v_head = v_pool + head_slot * DV;
AsyncCopies copies;
