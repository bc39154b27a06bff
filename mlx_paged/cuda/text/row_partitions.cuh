// CUDA only: the partitions of a row, for decode kernels for tensor cores and what joins their results.
// The size of partitions depends only on how many tokens the row sees, never on the rest of the batch.
const int begin = metal::max(static_cast<int>(starts[row]), 0);
const int end = static_cast<int>(ends[row]);
int doublings = 0;
while (end - begin > (SPAN * PART) << 2 * doublings) doublings++;
const int size = PART << doublings;
const int origin = begin / 64 * 64;
const int n_live = begin < end ? (end - origin + size - 1) / PART >> doublings : 0;
