// Of paged_prefill_tensor: where the head's keys and values lie.
const T* k_head = k_pool + static_cast<int64_t>(kv_head) * (BS * D);
const T* v_head = v_pool + static_cast<int64_t>(kv_head) * (BS * DV);
AsyncCopies copies;
