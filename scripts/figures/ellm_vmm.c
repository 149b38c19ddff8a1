/* The system calls of kvbench's host driver of virtual memory, as a C program makes them: map each chunk, make the
 * range accessible, touch every page, and give it back. And a loop over calls of one function, for those of a driver. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

typedef int64_t i64;

/* Return 0, or the error of the first call that failed. */
i64 c_take(i64 fd, i64 base, i64 chunk, i64 count, i64 page, i64 value)
{
    for (i64 k = 0; k < count; k++)
        if (mmap((void *)(base + k * chunk), (size_t)chunk, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)fd, k * chunk) ==
            MAP_FAILED)
            return errno;
    if (mprotect((void *)base, (size_t)(chunk * count), PROT_READ | PROT_WRITE))
        return errno;
    if (madvise((void *)base, (size_t)(chunk * count), MADV_POPULATE_WRITE))
        return errno;
    for (i64 k = 0; k < count; k++)
        for (i64 at = 0; at < chunk; at += page)
            *(volatile unsigned char *)(base + k * chunk + at) = (unsigned char)value;
    return 0;
}

i64 c_back(i64 fd, i64 base, i64 chunk, i64 count, i64 cold)
{
    int quiet = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap((void *)base, (size_t)(chunk * count), PROT_NONE, quiet, -1, 0) == MAP_FAILED)
        return errno;
    for (i64 k = 0; cold && k < count; k++)
        if (fallocate((int)fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, k * chunk, chunk))
            return errno;
    return 0;
}

/* Calls of a driver's function that returns 0 for success; the first other code, or 0. */
i64 c_calls(i64 function, const i64 *rows, i64 count)
{
    int (*call)(i64, i64, i64, i64, i64, i64) = (int (*)(i64, i64, i64, i64, i64, i64))(uintptr_t)function;
    for (i64 k = 0; k < count; k++) {
        const i64 *row = rows + 6 * k;
        int code = call(row[0], row[1], row[2], row[3], row[4], row[5]);
        if (code)
            return code;
    }
    return 0;
}
