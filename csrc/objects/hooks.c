/* hooks.c: between CPython's allocators and the region.
 *
 * The hooks stay for ever: blocks that they handed out may come back at any time. Whatever is not ours
 * goes to the allocator that was there before, by its own context, so that any number of tools may
 * stand before and behind.
 *
 * Another tool that was there first, and puts back what it found when it leaves, takes our hooks out.
 * arena/objects.py refuses to connect under tracemalloc; for the others a begin looks whether a block
 * that it asks for arrives here, and hooks again if not. Each time has its own record of what was there
 * before, so that a chain in which we stand twice has an end.
 */
#include "objects.h"

enum { DOMAINS = 2, TIMES = 8 };

typedef struct hook {
    PyMemAllocatorEx outside;
} hook;

static hook hooks[TIMES][DOMAINS];
static unsigned times;
static bool arrived; /* a request has come here since it was last looked at */
static const PyMemAllocatorDomain domains[DOMAINS] = {PYMEM_DOMAIN_MEM, PYMEM_DOMAIN_OBJ};

/* A growing list or bytearray begins as a small block, which is not ours. When it becomes larger than
 * that it may become ours: up to this size, for the block is copied once more than it need be. Without
 * it the lists of json.loads stay outside: the peak of benchmarks/objects.py was 6 % higher (75.1 MB,
 * not 70.8), and what rested 13 % (66.2 MB, not 58.6). */
#define ADOPTED ((size_t)4096)

void *arena__captured_new(size_t size, bool zero) {
    arena__capture *capture = arena__capturing();
    if (!capture) return NULL;
    return arena__block_new(capture, arena__site(capture), size, zero);
}

static void *hook_malloc(void *ctx, size_t size) {
    const PyMemAllocatorEx *outside = &((const hook *)ctx)->outside;
    if (size > ARENA__SMALL && arena__self) {
        arrived = true;
        void *block = arena__captured_new(size, false);
        if (block) return block;
    }
    return outside->malloc(outside->ctx, size);
}

static void *hook_calloc(void *ctx, size_t count, size_t each) {
    const PyMemAllocatorEx *outside = &((const hook *)ctx)->outside;
    size_t size;
    if (arena__self && !__builtin_mul_overflow(count, each, &size) && size > ARENA__SMALL) {
        void *block = arena__captured_new(size, true);
        if (block) return block;
    }
    return outside->calloc(outside->ctx, count, each);
}

static void hook_free(void *ctx, void *block) {
    const PyMemAllocatorEx *outside = &((const hook *)ctx)->outside;
    if (arena__ours(block))
        arena__block_free(block);
    else
        outside->free(outside->ctx, block);
}

/* A block of ours becomes another size. A growing thing stays in the tick that made it, whichever is
 * open now; what has escaped is the current tick's again, or goes outside when none is open. On failure
 * NULL, and the block is as it was; but what shrinks never fails. */
void *arena__ours_resize(void *block, size_t size, arena__malloc outside, void *ctx) {
    arena__place place;
    if (!arena__block_find(block, &place)) return NULL;
    if (arena__block_fit(block, &place, size)) return block;
    void *moved = NULL;
    if (size > ARENA__SMALL) {
        arena__note note = *place.note;
        arena__capture *capture = note.tag ? arena__by_tag[note.tag] : arena__capturing();
        if (capture) {
            uint32_t site = note.tag ? note.site : arena__site(capture);
            moved = arena__block_move(block, &place, capture, site, size);
            if (moved) return moved;
        }
    }
    moved = outside(ctx, size);
    if (!moved) return size <= place.size ? block : NULL;
    memcpy(moved, block, place.size < size ? place.size : size);
    arena__block_free(block);
    return moved;
}

/* A block from outside that has grown out of the small ones: it is copied once more, from where it
 * grew to. The allocator outside alone knows how large it was before. */
static void *adopt(const PyMemAllocatorEx *outside, void *block, size_t size) {
    void *ours = arena__captured_new(size, false);
    if (!ours) return block;
    memcpy(ours, block, size);
    outside->free(outside->ctx, block);
    return ours;
}

static void *hook_realloc(void *ctx, void *block, size_t size) {
    const PyMemAllocatorEx *outside = &((const hook *)ctx)->outside;
    if (!block) return hook_malloc(ctx, size);
    if (arena__ours(block)) return arena__ours_resize(block, size, outside->malloc, outside->ctx);
    block = outside->realloc(outside->ctx, block, size);
    if (block && size > ARENA__SMALL && size <= ADOPTED && arena__self)
        return adopt(outside, block, size);
    return block;
}

bool arena__hooks_install(void) {
    if (times == TIMES) return false;
    for (unsigned i = 0; i < DOMAINS; i++) {
        hook *mine = &hooks[times][i];
        PyMem_GetAllocator(domains[i], &mine->outside);
        PyMemAllocatorEx inside = {mine, hook_malloc, hook_calloc, hook_realloc, hook_free};
        PyMem_SetAllocator(domains[i], &inside);
    }
    times++;
    return true;
}

static bool reached(PyMemAllocatorDomain domain) {
    PyMemAllocatorEx now;
    PyMem_GetAllocator(domain, &now);
    if (ARENA__LIKELY(now.malloc == hook_malloc)) return true;
    arrived = false;
    now.free(now.ctx, now.malloc(now.ctx, ARENA__SMALL + 1));
    return arrived;
}

/* Hooks again when others have taken the hooks out. */
void arena__hooks_check(void) {
    if (ARENA__UNLIKELY(!reached(PYMEM_DOMAIN_OBJ) || !reached(PYMEM_DOMAIN_MEM)))
        (void)arena__hooks_install();
}
