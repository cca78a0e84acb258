#define _GNU_SOURCE
#include "shared.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SIZE (32u << 20)
#define HEAP (16u << 20)
#define GRAIN 64u
#define PAGE 4096u

static unsigned char *memory;
/* Read and write ends. */
static int wake[2], woken[2];

/* The heap: sizes are powers of two, each with a list of free pieces. Their sizes are kept apart from
 * them, since the other side may write anywhere in the memory. */
static size_t heap_end;
static unsigned char class_of[HEAP / GRAIN];
static struct {
	size_t *offsets;
	size_t count, room;
} free_pieces[32];

static void fail(const char *what)
{
	fprintf(stderr, "%s\n", what);
	exit(1);
}

void shared_init(void)
{
	int fd = memfd_create("virtqueues", 0);

	if (fd < 0 || ftruncate(fd, SIZE))
		fail("cannot make shared memory");
	memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED)
		fail("cannot map shared memory");
	if (pipe2(wake, O_NONBLOCK) || pipe2(woken, O_NONBLOCK))
		fail("cannot make pipes");
	printf("memory %d %llu %u %u %d %d\n", fd, (unsigned long long)(uintptr_t)memory, SIZE, HEAP, wake[0],
	       woken[1]);
	fflush(stdout);
}

void shared_wake(void)
{
	/* A full pipe wakes as well. */
	if (write(wake[1], "", 1) != 1 && errno != EAGAIN)
		fail("cannot notify the test");
}

void shared_sleep(void)
{
	struct pollfd readable = { .fd = woken[0], .events = POLLIN };
	char bytes[4096];

	if (poll(&readable, 1, 20000) != 1)
		fail("no notification came for 20 seconds");
	if (read(woken[0], bytes, sizeof(bytes)) < 1)
		fail("cannot read the notification");
}

void *shared_malloc(size_t size)
{
	unsigned char class = 6;
	size_t piece, offset, align;

	while (((size_t)1 << class) < size)
		class++;
	piece = (size_t)1 << class;
	if (free_pieces[class].count) {
		offset = free_pieces[class].offsets[--free_pieces[class].count];
	} else {
		align = piece < PAGE ? piece : PAGE;
		offset = (heap_end + align - 1) & ~(align - 1);
		if (offset + piece > HEAP)
			return NULL;
		heap_end = offset + piece;
	}
	class_of[offset / GRAIN] = class;
	memset(memory + offset, 0, piece);
	return memory + offset;
}

void shared_free(void *piece)
{
	size_t offset = (unsigned char *)piece - memory;
	unsigned char class;

	if (!piece)
		return;
	class = offset < HEAP ? class_of[offset / GRAIN] : 0;
	if (!class)
		fail("freed what is not in use");
	class_of[offset / GRAIN] = 0;
	memset(piece, 0xdd, (size_t)1 << class);
	if (free_pieces[class].count == free_pieces[class].room) {
		free_pieces[class].room = 2 * free_pieces[class].room + 16;
		free_pieces[class].offsets =
			realloc(free_pieces[class].offsets, free_pieces[class].room * sizeof(size_t));
		if (!free_pieces[class].offsets)
			fail("out of memory");
	}
	free_pieces[class].offsets[free_pieces[class].count++] = offset;
}

unsigned char *shared_at(uint64_t address, uint64_t len)
{
	uint64_t offset = address - (uintptr_t)memory;

	if (offset > SIZE || len > SIZE - offset)
		fail("an address outside the shared memory");
	return memory + offset;
}

static char *rest;

uint64_t shared_number(void)
{
	char *end;
	uint64_t number = strtoull(rest, &end, 10);

	if (end == rest)
		fail("a number is missing");
	rest = end;
	return number;
}

void shared_answer(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
}

/* Many commands may come in one piece; their answers go back in one. */
void shared_serve(void (*command)(const char *name))
{
	static char input[1 << 20];
	static char output[1 << 16];
	size_t have = 0;
	ssize_t got;

	setvbuf(stdout, output, _IOFBF, sizeof(output));
	while ((got = read(0, input + have, sizeof(input) - have)) > 0) {
		char *line = input, *end;

		have += got;
		while ((end = memchr(line, '\n', input + have - line))) {
			*end = 0;
			rest = strchr(line, ' ');
			if (rest)
				*rest++ = 0;
			else
				rest = end;
			command(line);
			putchar('\n');
			line = end + 1;
		}
		have -= line - input;
		memmove(input, line, have);
		if (have == sizeof(input))
			fail("a line is too long");
		fflush(stdout);
	}
}

unsigned char shared_pattern(uint64_t seed, uint64_t position)
{
	return seed * 31 + position * 7;
}

uint64_t shared_sum(uint64_t sum, const unsigned char *bytes, size_t len)
{
	/* FNV-1a. */
	while (len--)
		sum = (sum ^ *bytes++) * 0x100000001b3ull;
	return sum;
}
