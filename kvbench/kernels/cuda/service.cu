// What the clock and the buffers need on the device: a blocker, a cache flush, the seeded payload and its checksum.
//
// Written in the part of CUDA C++ that is also C, without barriers or warp votes: tests compile the same text with a
// C compiler and run it one thread after the other (tests/fake_cuda), so its arithmetic is checked without a GPU.

#ifndef KV_KERNEL
typedef unsigned int u32;
typedef unsigned long long u64;
#define KV_KERNEL extern "C" __global__
#define KV_DEVICE static __device__ __forceinline__
KV_DEVICE u64 kv_now(void) {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
KV_DEVICE void kv_pause(void) { __nanosleep(64); }
KV_DEVICE void kv_add(u64 *to, u64 value) { atomicAdd(to, value); }
#endif

#define KV_WORDS (1ull << 17)  // 64-bit words of a payload block, 1 MiB: kvbench.memory.payload

// One step of SplitMix64, as in kvbench.memory.payload.
KV_DEVICE u64 kv_mix(u64 x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Hold the stream until the host writes `ticket` to *go. After timeout_ns of the device's own clock give up and say so
// in *late: a host call that waits for the device would otherwise wait for ever (nvbench issue 240).
KV_KERNEL void kv_block(const volatile u32 *go, volatile u32 *late, u32 ticket, u64 timeout_ns) {
    u64 begin = kv_now();
    while (*go != ticket) {
        if (kv_now() - begin > timeout_ns) {
            *late = ticket;
            return;
        }
        kv_pause();
    }
}

// Read `words` words, all zero, so that they take the place of whatever the cache held. Only reads: dirty lines left
// behind would be written back inside the next timed window. `never` is not zero, so nothing is ever stored, which the
// compiler cannot know.
KV_KERNEL void kv_flush(u64 *buffer, u64 words, u64 never) {
    u64 step = (u64)gridDim.x * blockDim.x, found = 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) found |= buffer[i];
    if (found == never) buffer[0] = found;
}

// Write payload.fill(seed, kind, offset 0): base[i mod block] xor a key of the block. `key` is mix(seed); `mask` keeps
// the exponent bits of doubles.
KV_KERNEL void kv_fill(u64 *out, u64 nbytes, const u64 *base, u64 key, u64 mask) {
    u64 words = nbytes / 8, step = (u64)gridDim.x * blockDim.x;
    u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (u64 i = first; i < words; i += step) out[i] = base[i % KV_WORDS] ^ (kv_mix(key ^ (i / KV_WORDS)) & mask);
    if (first == 0 && nbytes % 8) {
        u64 last = base[words % KV_WORDS] ^ (kv_mix(key ^ (words / KV_WORDS)) & mask);
        for (u64 b = 0; b < nbytes % 8; b++) ((unsigned char *)(out + words))[b] = (unsigned char)(last >> (8 * b));
    }
}

KV_DEVICE u64 kv_weighed(u64 word, u64 weight) { return (word ^ (word >> 31)) * weight; }

// Add to sums[b] what payload.checksum adds up for each 1 MiB block b; sums start as zero.
KV_KERNEL void kv_checksum(const u64 *data, u64 nbytes, const u64 *weights, u64 *sums) {
    u64 words = nbytes / 8, blocks = (nbytes + 8 * KV_WORDS - 1) / (8 * KV_WORDS);
    for (u64 b = blockIdx.x; b < blocks; b += gridDim.x) {
        u64 low = b * KV_WORDS, high = low + KV_WORDS < words ? low + KV_WORDS : words, sum = 0;
        for (u64 i = low + threadIdx.x; i < high; i += blockDim.x) sum += kv_weighed(data[i], weights[i - low]);
        if (threadIdx.x == 0 && b == blocks - 1 && nbytes % 8) {
            u64 last = 0;
            for (u64 t = 0; t < nbytes % 8; t++) last |= (u64)((const unsigned char *)(data + words))[t] << (8 * t);
            sum += kv_weighed(last, weights[words - low]);
        }
        kv_add(sums + b, sum);
    }
}

// Add up the mixed block sums; the host adds mix(nbytes).
KV_KERNEL void kv_checksum_end(const u64 *sums, u64 blocks, u64 *total) {
    u64 step = (u64)gridDim.x * blockDim.x, sum = 0;
    for (u64 b = (u64)blockIdx.x * blockDim.x + threadIdx.x; b < blocks; b += step) sum += kv_mix(sums[b] ^ kv_mix(b));
    kv_add(total, sum);
}
