// Metal: what the kernels for quantised pages need besides the prelude.

inline float float_of(uint bits) { return as_type<float>(bits); }

// Return the value of a code, as MLX's dequantising kernel computes it.
template <typename T>
inline T dequantized(T scale, uint code, T bias) {
  return static_cast<T>(scale * static_cast<uint8_t>(code) + bias);
}

template <typename T, int N>
inline void set_packet(thread Packet<T, N>& packet, int i, T value) {
  packet.part[i / 4][i % 4] = value;
}

// Load one word, or two that are aligned to 8 bytes.
template <int N, typename P>
inline void load_words(P source, thread uint* words) {
  if (N == 1) {
    words[0] = source[0];
  } else {
    const uint2 pair = *reinterpret_cast<const device uint2*>(source);
    words[0] = pair.x;
    words[N - 1] = pair.y;
  }
}
