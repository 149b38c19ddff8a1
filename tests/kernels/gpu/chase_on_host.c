// chase.cu as C, for ctypes.
#include "chase.cu"

void host_chase(u64 *out, u64 head, u64 warm, u64 loads)
{
    steps = readings = 0;
    kvbench_chase(out, head, warm, loads);
}
