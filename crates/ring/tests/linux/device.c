/* Linux's device side of a split virtqueue (drivers/vhost/vringh.c) at the end of a pipe. Commands, and answers:
 *
 *   queue SIZE FEATURES DESC DRIVER DEVICE       addresses of the areas
 *   pop                  1 HEAD READABLE WRITABLE SUM {ADDRESS LEN}..., or 0, or "error ERRNO"
 *                        SUM is over the readable bytes
 *   complete HEAD LEN    the driver sees it at once; LEN bytes of pattern HEAD are written first
 *   notify               1: the driver wants an interrupt for what was completed since the last question
 *   enable               1, or 0: more is available already
 *   disable
 *   serve COUNT          INTERRUPTS SLEEPS       serves COUNT chains by itself, while the driver runs: 8 bytes each way
 */
#include <stdlib.h>
#include <string.h>
#include <linux/vringh.h>
#include "shared.h"

#define MAX_HEADS 32768
#define FIRST_SEGMENTS 4

/* The user-space kmalloc wants them. */
void *__kmalloc_fake, *__kfree_ignore_start, *__kfree_ignore_end;
/* vringh's access to a user's memory wants them; the kernel's variant, used here, does not. */
void *__user_addr_min, *__user_addr_max;

static struct vringh ring;

/* What each chain in flight may still write. */
static struct {
	bool in_flight;
	struct vringh_kiov writable;
} *chains;

static void make_queue(void)
{
	unsigned size = shared_number();
	uint64_t features = shared_number();
	struct vring_desc *desc = (void *)shared_at(shared_number(), 16ull * size);
	struct vring_avail *avail = (void *)shared_at(shared_number(), 6 + 2ull * size);
	struct vring_used *used = (void *)shared_at(shared_number(), 6 + 8ull * size);
	unsigned head;

	for (head = 0; head < MAX_HEADS; head++)
		if (chains[head].in_flight) {
			vringh_kiov_cleanup(&chains[head].writable);
			chains[head].in_flight = false;
		}
	if (size > MAX_HEADS || vringh_init_kern(&ring, features, size, true, desc, avail, used))
		exit(1);
}

static void pop(void)
{
	/* Freed and made anew for each chain: the segments start in an array of vringh's own. */
	struct vringh_kiov readable, writable;
	uint64_t sum = SHARED_SUM_START;
	unsigned char bytes[4096];
	unsigned i;
	u16 head;
	ssize_t len;
	int got;

	vringh_kiov_init(&readable, NULL, 0);
	vringh_kiov_init(&writable, NULL, 0);
	got = vringh_getdesc_kern(&ring, &readable, &writable, &head, GFP_KERNEL);
	if (got != 1) {
		if (got)
			shared_answer("error %d", got);
		else
			shared_answer("0");
		vringh_kiov_cleanup(&readable);
		vringh_kiov_cleanup(&writable);
		return;
	}
	if (head >= MAX_HEADS || chains[head].in_flight)
		exit(1);
	/* Pulling moves the places of the segments: the sum comes last. */
	struct kvec segments[readable.used + writable.used + 1];

	memcpy(segments, readable.iov, readable.used * sizeof(*segments));
	memcpy(segments + readable.used, writable.iov, writable.used * sizeof(*segments));
	unsigned count = readable.used + writable.used;
	unsigned readables = readable.used;

	while ((len = vringh_iov_pull_kern(&readable, bytes, sizeof(bytes))) > 0)
		sum = shared_sum(sum, bytes, len);
	shared_answer("1 %u %u %u %llu", head, readables, count - readables, (unsigned long long)sum);
	for (i = 0; i < count; i++)
		shared_answer(" %llu %zu", (unsigned long long)(uintptr_t)segments[i].iov_base, segments[i].iov_len);
	vringh_kiov_cleanup(&readable);
	chains[head].in_flight = true;
	chains[head].writable = writable;
}

static void complete(void)
{
	uint64_t head = shared_number(), len = shared_number(), at;

	if (head >= MAX_HEADS || !chains[head].in_flight)
		exit(1);
	for (at = 0; at < len; at++) {
		unsigned char byte = shared_pattern(head, at);

		if (vringh_iov_push_kern(&chains[head].writable, &byte, 1) != 1)
			exit(1);
	}
	vringh_kiov_cleanup(&chains[head].writable);
	chains[head].in_flight = false;
	if (vringh_complete_kern(&ring, head, len))
		exit(1);
}

static void serve(void)
{
	uint64_t count = shared_number(), done = 0, interrupts = 0, sleeps = 0, value;
	struct vringh_kiov readable, writable;
	u16 head;
	int got;

	vringh_kiov_init(&readable, NULL, 0);
	vringh_kiov_init(&writable, NULL, 0);
	for (;;) {
		vringh_notify_disable_kern(&ring);
		while ((got = vringh_getdesc_kern(&ring, &readable, &writable, &head, GFP_KERNEL)) == 1) {
			if (vringh_iov_pull_kern(&readable, &value, 8) != 8 || value != done)
				exit(1);
			value = value * 3 + 1;
			if (vringh_iov_push_kern(&writable, &value, 8) != 8 || vringh_complete_kern(&ring, head, 8))
				exit(1);
			done++;
			if (vringh_need_notify_kern(&ring) == 1) {
				interrupts++;
				shared_wake();
			}
		}
		if (got)
			exit(1);
		if (done == count)
			break;
		if (vringh_notify_enable_kern(&ring)) {
			sleeps++;
			shared_sleep();
		}
	}
	vringh_kiov_cleanup(&readable);
	vringh_kiov_cleanup(&writable);
	shared_answer("%llu %llu", (unsigned long long)interrupts, (unsigned long long)sleeps);
}

static void command(const char *name)
{
	if (!strcmp(name, "queue"))
		make_queue();
	else if (!strcmp(name, "pop"))
		pop();
	else if (!strcmp(name, "complete"))
		complete();
	else if (!strcmp(name, "notify"))
		shared_answer("%d", vringh_need_notify_kern(&ring));
	else if (!strcmp(name, "serve"))
		serve();
	else if (!strcmp(name, "enable"))
		shared_answer("%d", vringh_notify_enable_kern(&ring));
	else if (!strcmp(name, "disable"))
		vringh_notify_disable_kern(&ring);
	else
		exit(1);
}

int main(void)
{
	chains = calloc(MAX_HEADS, sizeof(*chains));
	if (!chains)
		return 1;
	shared_init();
	shared_serve(command);
	return 0;
}
