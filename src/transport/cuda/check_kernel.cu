// Counts bytes that are not as they should be: what tools and tests verify GPU memory with, where it lies.
// Words of 8 B first, the bytes of those that differ one by one; the rest behind the last word by the first thread.
extern "C" __global__ void kvloom_count_wrong(const unsigned char* got, const unsigned char* expected, unsigned long long bytes,
                                              unsigned long long* wrong) {
  const unsigned long long first = blockIdx.x * static_cast<unsigned long long>(blockDim.x) + threadIdx.x;
  const unsigned long long stride = gridDim.x * static_cast<unsigned long long>(blockDim.x);
  const bool aligned =
      reinterpret_cast<unsigned long long>(got) % 8 == 0 && reinterpret_cast<unsigned long long>(expected) % 8 == 0;
  const unsigned long long words = aligned ? bytes / 8 : 0;
  unsigned long long count = 0;
  for (unsigned long long i = first; i < words; i += stride) {
    const unsigned long long differs =
        reinterpret_cast<const unsigned long long*>(got)[i] ^ reinterpret_cast<const unsigned long long*>(expected)[i];
    for (int byte = 0; byte < 64; byte += 8) count += (differs >> byte & 0xff) != 0;
  }
  for (unsigned long long i = words * 8 + first; i < bytes; i += stride) count += got[i] != expected[i];
  if (count != 0) atomicAdd(wrong, count);
}
