/* Graphs of kernel and copy nodes: built node by node, instantiated, launched onto a stream as the kernels they hold. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdlib.h>
#include <string.h>

typedef struct Node {
    Op op; /* arguments are copied when the node is added, as the documentation says: not when the graph runs */
    const struct Node *origin; /* of a node of an exec: the graph's node it was made from */
    struct Node *next;
} Node;
/* A graph, or (exec) what was instantiated of one: its nodes are its own, so the graph may go before it. */
typedef struct Graph {
    int open, exec;
    Context *ctx;
    Node *first, **last;
    struct Graph *next;
} Graph;
static Graph *graphs;

static Graph *find(const void *handle, int exec) {
    Graph *g = graphs;
    while (g && !((const void *)g == handle && g->open && g->exec == exec && g->ctx == fake_context())) g = g->next;
    return g;
}

static Graph *make(int exec) {
    Graph *g = calloc(1, sizeof *g);
    *g = (Graph){.open = 1, .exec = exec, .ctx = fake_context(), .next = graphs};
    g->last = &g->first;
    graphs = g;
    fake_count(exec ? "graph_execs" : "graphs", 1);
    return g;
}

static Node *append(Graph *g, const Op *op) {
    Node *node = calloc(1, sizeof *node);
    node->op = *op;
    *g->last = node;
    g->last = &node->next;
    return node;
}

CUresult cuGraphCreate(CUgraph *graph, unsigned int flags) {
    ENTER(IN_CONTEXT, flags, 0, 0, 0);
    if (flags) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    *graph = (CUgraph)make(0);
    return fake_leave(CUDA_SUCCESS);
}

CUresult cuGraphAddKernelNode_v2(CUgraphNode *added, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                 const CUDA_KERNEL_NODE_PARAMS *p) {
    ENTER(IN_CONTEXT, graph, count, p, 0);
    Graph *g = find(graph, 0);
    const Kernel *kernel = (const Kernel *)p->func;
    if (!g || !kernel || !kernel->run) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    uint64_t threads = (uint64_t)p->blockDimX * p->blockDimY * p->blockDimZ;
    if (p->extra || !p->gridDimX || !p->gridDimY || !p->gridDimZ || !threads || threads > 1024 || (count && !dependencies))
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        const Node *before = g->first;
        while (before && (CUgraphNode)before != dependencies[i]) before = before->next;
        if (!before) return fake_leave(CUDA_ERROR_INVALID_VALUE);
    }
    Op op = {.kind = OP_KERNEL, .kernel = kernel, .grid = {p->gridDimX, p->gridDimY, p->gridDimZ},
             .block = {p->blockDimX, p->blockDimY, p->blockDimZ}};
    for (int i = 0; i < kernel->params; i++) memcpy(&op.params[i], p->kernelParams[i], (size_t)kernel->sizes[i]);
    *added = (CUgraphNode)append(g, &op);
    return fake_leave(CUDA_SUCCESS);
}

/* One-dimensional copies between addresses alone, as an exec that will be updated must have. */
static CUresult copy_op(const CUDA_MEMCPY3D_v2 *p, Op *op) {
    const CUmemorytype any = CU_MEMORYTYPE_UNIFIED;
    if (p->srcMemoryType != any || p->dstMemoryType != any || p->Height != 1 || p->Depth != 1 || !p->WidthInBytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (p->srcXInBytes || p->srcY || p->srcZ || p->dstXInBytes || p->dstY || p->dstZ || p->reserved0 || p->reserved1)
        return CUDA_ERROR_INVALID_VALUE;
    if (!fake_translate(p->srcDevice, p->WidthInBytes, 1) || !fake_translate(p->dstDevice, p->WidthInBytes, 1))
        return CUDA_ERROR_INVALID_VALUE;
    *op = (Op){.kind = OP_COPY, .dst = p->dstDevice, .src = p->srcDevice, .bytes = p->WidthInBytes};
    return CUDA_SUCCESS;
}

CUresult cuGraphAddMemcpyNode(CUgraphNode *added, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                              const CUDA_MEMCPY3D_v2 *p, CUcontext ctx) {
    ENTER(IN_CONTEXT, graph, count, p, ctx);
    Graph *g = find(graph, 0);
    Op op;
    if (!g) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    if ((Context *)ctx != fake_context() || (count && !dependencies)) return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    CUresult result = copy_op(p, &op);
    if (!result) *added = (CUgraphNode)append(g, &op);
    return fake_leave(result);
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D_v2 *p, CUcontext ctx) {
    ENTER(IN_CONTEXT, exec, node, p, ctx);
    Graph *g = find(exec, 1);
    if (!g) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    for (Node *own = g->first; own; own = own->next)
        if (own->origin == (const Node *)node && own->op.kind == OP_COPY) {
            Op op;
            CUresult result = copy_op(p, &op);
            if (!result) own->op = op;
            return fake_leave(result);
        }
    return fake_leave(CUDA_ERROR_INVALID_VALUE);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    ENTER(IN_CONTEXT, graph, flags, 0, 0);
    Graph *g = find(graph, 0);
    if (!g || flags) return fake_leave(g ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE);
    Graph *made = make(1);
    for (const Node *node = g->first; node; node = node->next) append(made, &node->op)->origin = node;
    *exec = (CUgraphExec)made;
    return fake_leave(CUDA_SUCCESS);
}

/* Nodes come back in the order they were added, each after those it depends on. */
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    ENTER(IN_CONTEXT, exec, stream, 0, 0);
    Graph *g = find(exec, 1);
    if (!g) return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    CUresult result = CUDA_SUCCESS;
    for (Node *node = g->first; node && !result; node = node->next) result = fake_submit(stream, &node->op);
    return fake_leave(result);
}

static CUresult destroy(const void *handle, int exec) {
    Graph *g = find(handle, exec);
    if (!g) return CUDA_ERROR_INVALID_HANDLE;
    g->open = 0; /* the memory stays until reset: a handle used afterwards must be found out */
    fake_count(exec ? "graph_execs" : "graphs", -1);
    return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec exec) {
    RELEASE(IN_CONTEXT, exec, 0);
    CUresult result = destroy(exec, 1);
    return fake_leave(result ? result : forced);
}

CUresult cuGraphDestroy(CUgraph graph) {
    RELEASE(IN_CONTEXT, graph, 0);
    CUresult result = destroy(graph, 0);
    return fake_leave(result ? result : forced);
}

void fake_graphs_reset(void) {
    while (graphs) {
        Graph *g = graphs;
        graphs = g->next;
        while (g->first) {
            Node *node = g->first;
            g->first = node->next;
            free(node);
        }
        free(g);
    }
}
