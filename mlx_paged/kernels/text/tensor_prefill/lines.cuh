// Of the prefill texts for tensor cores: the lines of a tile's rows, and the blocks of a step.
if (unit + thread_index == 0) {
  fence_out[0] = fence[0] + 1u;
}
if (n_tokens == 0) return;

// A line of q and of out; rows past the last token are those of the last, and are not stored.
auto line_of = [&](int row) {
  return (static_cast<int64_t>(first_row + metal::min(row / G, n_tokens - 1)) * n_kv + kv_head) * G + row % G;
};
// The ids of a step's blocks, one a lane.
auto look_up = [&](int step) {
  return table[metal::min(metal::max(step * KEYS / BS + metal::min(lane, BLOCKS - 1), lo / BS), (hi - 1) / BS)];
};
