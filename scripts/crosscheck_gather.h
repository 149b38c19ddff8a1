/* Included once for each prefetch locality (HINT, READ, COPY); distance < 0 means no prefetch. */

__attribute__((noinline)) static void READ(const char *src, const i64 *order, i64 lo, i64 hi, i64 fragment, i64 distance,
                                           u64 *sums)
{
    line a = {0}, b = {0}, c = {0}, d = {0}, e = {0}, f = {0}, g = {0}, h = {0};
    u64 mixed = 0;
    i64 unit = fragment % 512 ? 64 : 512;
    i64 place = distance < 0 ? hi : lo + distance / fragment;
    const char *q = place < hi ? src + order[place] * fragment : 0, *q_end = q + fragment;
    if (q)
        q += distance % fragment / unit * unit;
    for (i64 k = lo; k < hi; k++) {
        const char *p = src + order[k] * fragment, *end = p + fragment;
        mixed += (u64)(k + 1) * AT(u64, p);
        for (; p < end; p += unit) {
            if (q)
                for (int n = 0; n < unit; n += 64)
                    FETCH(q + n);
            a += AT(line, p);
            if (unit == 512) {
                b += AT(line, p + 64);
                c += AT(line, p + 128);
                d += AT(line, p + 192);
                e += AT(line, p + 256);
                f += AT(line, p + 320);
                g += AT(line, p + 384);
                h += AT(line, p + 448);
            }
            if (q && (q += unit) == q_end) {
                q = ++place < hi ? src + order[place] * fragment : 0;
                q_end = q + fragment;
            }
        }
    }
    sums[0] += lanes(a + b + c + d + e + f + g + h);
    sums[1] += mixed;
}

__attribute__((noinline)) static void COPY(char *dst, const char *src, const i64 *order, i64 lo, i64 hi, i64 fragment,
                                           i64 distance, int past_caches)
{
    i64 unit = fragment % 512 ? 64 : 512;
    i64 place = distance < 0 ? hi : lo + distance / fragment;
    const char *q = place < hi ? src + order[place] * fragment : 0, *q_end = q + fragment;
    if (q)
        q += distance % fragment / unit * unit;
    for (i64 k = lo; k < hi; k++) {
        const char *p = src + order[k] * fragment, *end = p + fragment;
        char *t = dst + k * fragment;
        for (; p < end; p += unit, t += unit) {
            if (q)
                for (int n = 0; n < unit; n += 64)
                    FETCH(q + n);
            if (unit == 512) {
                line a = AT(line, p), b = AT(line, p + 64), c = AT(line, p + 128), d = AT(line, p + 192);
                line e = AT(line, p + 256), f = AT(line, p + 320), g = AT(line, p + 384), h = AT(line, p + 448);
                compiler_barrier();
                if (past_caches) {
                    stream_line(t, a), stream_line(t + 64, b), stream_line(t + 128, c), stream_line(t + 192, d);
                    stream_line(t + 256, e), stream_line(t + 320, f), stream_line(t + 384, g), stream_line(t + 448, h);
                } else {
                    AT(line, t) = a, AT(line, t + 64) = b, AT(line, t + 128) = c, AT(line, t + 192) = d;
                    AT(line, t + 256) = e, AT(line, t + 320) = f, AT(line, t + 384) = g, AT(line, t + 448) = h;
                }
            } else if (past_caches) {
                stream_line(t, AT(line, p));
            } else {
                AT(line, t) = AT(line, p);
            }
            if (q && (q += unit) == q_end) {
                q = ++place < hi ? src + order[place] * fragment : 0;
                q_end = q + fragment;
            }
        }
    }
    if (past_caches)
        drain();
}

#undef HINT
#undef READ
#undef COPY
