/* Linux's driver side of a virtqueue (drivers/virtio/virtio_ring.c) at the end of a pipe. Commands, and answers:
 *
 *   queue SIZE FEATURES                          DESC DRIVER DEVICE   addresses of the areas
 *   add ID READABLE WRITABLE {ADDRESS LEN}...    1, or 0: full        fills the readable segments
 *   kick                                         1: the device wants it
 *   used                                         1 ID LEN SUM, or 0   SUM is over the bytes that were written
 *   enable                                       TOKEN
 *   poll TOKEN                                   1: something was used since
 *   enable_delayed                               1, or 0: more was used meanwhile
 *   disable
 *   take_back                                    1 ID, or 0           after this the queue is of no more use
 *   stream COUNT OUTSTANDING ADDRESS             KICKS SLEEPS         moves COUNT buffers by itself while the
 *                                                                     device runs: 8 bytes go over, 8 come back
 *   broken                                       1: Linux has given the queue up
 */
#include <stdlib.h>
#include <string.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>
#include "shared.h"

#define MAX_SEGMENTS 64
#define MAX_BUFFERS 65536

/* What Linux exports and its user-space headers leave out. */
bool virtqueue_kick_prepare(struct virtqueue *queue);
unsigned virtqueue_enable_cb_prepare(struct virtqueue *queue);
bool virtqueue_poll(struct virtqueue *queue, unsigned token);
bool virtqueue_is_broken(struct virtqueue *queue);
dma_addr_t virtqueue_get_desc_addr(struct virtqueue *queue);
dma_addr_t virtqueue_get_avail_addr(struct virtqueue *queue);
dma_addr_t virtqueue_get_used_addr(struct virtqueue *queue);

/* The user-space kmalloc wants them. */
void *__kmalloc_fake, *__kfree_ignore_start, *__kfree_ignore_end;

static struct virtio_device device;
static struct virtqueue *queue;

static struct buffer {
	uint64_t id;
	unsigned count;
	struct {
		unsigned char *bytes;
		unsigned len;
	} writable[MAX_SEGMENTS];
} *buffers;

static bool notify(struct virtqueue *vq)
{
	return true; /* Called when a readable buffer finds the queue full; whether to kick is asked by "kick". */
}

static void make_queue(void)
{
	unsigned size = shared_number();

	if (queue)
		vring_del_virtqueue(queue);
	memset(&device, 0, sizeof(device));
	INIT_LIST_HEAD(&device.vqs);
	spin_lock_init(&device.vqs_list_lock);
	device.features = shared_number();
	queue = vring_create_virtqueue(0, size, 4096, &device, true, false, false, notify, NULL, "queue");
	if (!queue)
		exit(1);
	shared_answer("%llu %llu %llu", virtqueue_get_desc_addr(queue), virtqueue_get_avail_addr(queue),
		      virtqueue_get_used_addr(queue));
}

static void add(void)
{
	struct scatterlist readable[MAX_SEGMENTS], writable[MAX_SEGMENTS], *lists[2];
	uint64_t id = shared_number();
	unsigned counts[2], lists_of[2] = { 0, 0 }, side, i;
	struct buffer *buffer;
	unsigned char *bytes;
	unsigned len, at, position = 0;
	int error;

	counts[0] = shared_number();
	counts[1] = shared_number();
	if (id >= MAX_BUFFERS || counts[0] > MAX_SEGMENTS || counts[1] > MAX_SEGMENTS)
		exit(1);
	buffer = &buffers[id];
	buffer->id = id;
	buffer->count = counts[1];
	for (side = 0; side < 2; side++) {
		struct scatterlist *list = side ? writable : readable;

		if (!counts[side])
			continue;
		lists[lists_of[0] + lists_of[1]] = list;
		lists_of[side] = 1;
		sg_init_table(list, counts[side]);
		for (i = 0; i < counts[side]; i++) {
			uint64_t address = shared_number();

			len = shared_number();
			bytes = shared_at(address, len);
			sg_set_buf(&list[i], bytes, len);
			if (side) {
				buffer->writable[i].bytes = bytes;
				buffer->writable[i].len = len;
			} else {
				for (at = 0; at < len; at++)
					bytes[at] = shared_pattern(id, position++);
			}
		}
	}
	error = virtqueue_add_sgs(queue, lists, lists_of[0], lists_of[1], buffer, GFP_ATOMIC);
	if (error && error != -ENOSPC)
		shared_answer("error %d", error);
	else
		shared_answer("%d", !error);
}

static void used(void)
{
	unsigned len, part, left, i;
	struct buffer *buffer = virtqueue_get_buf(queue, &len);
	uint64_t sum = SHARED_SUM_START;

	if (!buffer) {
		shared_answer("0");
		return;
	}
	for (left = len, i = 0; i < buffer->count && left; left -= part, i++) {
		part = left < buffer->writable[i].len ? left : buffer->writable[i].len;
		sum = shared_sum(sum, buffer->writable[i].bytes, part);
	}
	shared_answer("1 %llu %u %llu", (unsigned long long)buffer->id, len, (unsigned long long)sum);
}

static void take_back(void)
{
	struct buffer *buffer = virtqueue_detach_unused_buf(queue);

	if (buffer)
		shared_answer("1 %llu", (unsigned long long)buffer->id);
	else
		shared_answer("0");
}

static void stream(void)
{
	uint64_t count = shared_number(), outstanding = shared_number(), address = shared_number();
	uint64_t added = 0, done = 0, kicks = 0, sleeps = 0, free_slots[256], frees = 0, value, slot;
	struct scatterlist readable, writable, *lists[2] = { &readable, &writable };
	struct buffer *buffer;
	unsigned token, len;

	while (frees < outstanding && frees < 256) {
		free_slots[frees] = frees;
		frees++;
	}
	while (done < count) {
		uint64_t before = done;

		while (added < count && frees) {
			unsigned char *bytes;

			slot = free_slots[frees - 1];
			bytes = shared_at(address + 64 * slot, 64);
			memcpy(bytes, &added, 8);
			memset(bytes + 32, 0, 8);
			buffer = &buffers[slot];
			buffer->id = slot;
			buffer->writable[0].bytes = bytes;
			sg_init_one(&readable, bytes, 8);
			sg_init_one(&writable, bytes + 32, 8);
			if (virtqueue_add_sgs(queue, lists, 1, 1, buffer, GFP_ATOMIC))
				break;
			frees--;
			added++;
		}
		if (virtqueue_kick_prepare(queue)) {
			kicks++;
			shared_wake();
		}
		virtqueue_disable_cb(queue);
		while ((buffer = virtqueue_get_buf(queue, &len))) {
			uint64_t sent;

			memcpy(&sent, buffer->writable[0].bytes, 8);
			memcpy(&value, buffer->writable[0].bytes + 32, 8);
			if (len != 8 || value != sent * 3 + 1)
				exit(1);
			free_slots[frees++] = buffer->id;
			done++;
		}
		if (done != before || done == count)
			continue;
		token = virtqueue_enable_cb_prepare(queue);
		if (!virtqueue_poll(queue, token)) {
			sleeps++;
			shared_sleep();
		}
	}
	shared_answer("%llu %llu", (unsigned long long)kicks, (unsigned long long)sleeps);
}

static void command(const char *name)
{
	if (!strcmp(name, "queue"))
		make_queue();
	else if (!strcmp(name, "add"))
		add();
	else if (!strcmp(name, "kick"))
		shared_answer("%d", virtqueue_kick_prepare(queue));
	else if (!strcmp(name, "used"))
		used();
	else if (!strcmp(name, "enable"))
		shared_answer("%u", virtqueue_enable_cb_prepare(queue));
	else if (!strcmp(name, "poll"))
		shared_answer("%d", virtqueue_poll(queue, shared_number()));
	else if (!strcmp(name, "enable_delayed"))
		shared_answer("%d", virtqueue_enable_cb_delayed(queue));
	else if (!strcmp(name, "disable"))
		virtqueue_disable_cb(queue);
	else if (!strcmp(name, "take_back"))
		take_back();
	else if (!strcmp(name, "stream"))
		stream();
	else if (!strcmp(name, "broken"))
		shared_answer("%d", virtqueue_is_broken(queue));
	else
		exit(1);
}

int main(void)
{
	buffers = calloc(MAX_BUFFERS, sizeof(*buffers));
	if (!buffers)
		return 1;
	shared_init();
	shared_serve(command);
	return 0;
}
