/*
 * Load on a disk by Linux's asynchronous I/O, for the guests of scripts/linux-guest. Blocks of 4 KiB, O_DIRECT.
 *
 *   disk-load reads FILE DEPTH PROCESSES COUNT   COUNT random reads, by processes on a CPU each with DEPTH in flight;
 *                                                prints reads a second
 *   disk-load writes FILE BLOCKS SECONDS SEED    random writes and reads; what is read must be what was written last.
 *                                                Prints their number. FILE.versions says what the file holds then
 *   disk-load check FILE                         compares FILE with FILE.versions
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 4096
#define WORDS (BLOCK / 8)
#define MOST 64
#define IN_FLIGHT 8

static void fail(const char *what)
{
	fprintf(stderr, "disk-load: %s: %s\n", what, strerror(errno));
	exit(1);
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

/* xorshift64 */
static uint64_t next(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	return *state ^= *state << 17;
}

/* One request each slot. */
struct load {
	int file;
	aio_context_t context;
	struct iocb requests[MOST];
	uint64_t (*buffers)[WORDS];
};

static void load_open(struct load *load, const char *path, int flags)
{
	memset(load, 0, sizeof(*load));
	load->file = open(path, flags | O_DIRECT, 0644);
	if (load->file < 0)
		fail(path);
	load->buffers = mmap(NULL, MOST * BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (load->buffers == MAP_FAILED)
		fail("mmap");
	if (syscall(SYS_io_setup, MOST, &load->context))
		fail("io_setup");
}

static void submit(struct load *load, int slot, int opcode, uint64_t block)
{
	struct iocb *request = &load->requests[slot];

	*request = (struct iocb){
		.aio_data = slot,
		.aio_lio_opcode = opcode,
		.aio_fildes = load->file,
		.aio_buf = (uintptr_t)load->buffers[slot],
		.aio_nbytes = BLOCK,
		.aio_offset = block * BLOCK,
	};
	if (syscall(SYS_io_submit, load->context, 1, &request) != 1)
		fail("io_submit");
}

static int completions(struct load *load, struct io_event *events)
{
	int done = syscall(SYS_io_getevents, load->context, 1, MOST, events, NULL);

	if (done < 1)
		fail("io_getevents");
	for (int i = 0; i < done; i++) {
		if (events[i].res != BLOCK) {
			errno = events[i].res < 0 ? -events[i].res : EIO;
			fail("a request");
		}
	}
	return done;
}

static void read_blocks(const char *path, int depth, long count, uint64_t seed)
{
	struct io_event events[MOST];
	struct load load;
	uint64_t blocks;
	long begun = 0, ended = 0;

	load_open(&load, path, O_RDONLY);
	blocks = lseek(load.file, 0, SEEK_END) / BLOCK;
	for (; begun < depth && begun < count; begun++)
		submit(&load, begun, IOCB_CMD_PREAD, next(&seed) % blocks);
	while (ended < count) {
		int done = completions(&load, events);

		ended += done;
		for (int i = 0; i < done && begun < count; i++, begun++)
			submit(&load, events[i].data, IOCB_CMD_PREAD, next(&seed) % blocks);
	}
}

static int reads(char **arguments)
{
	int depth = atoi(arguments[1]), processes = atoi(arguments[2]), failed = 0;
	long count = atol(arguments[3]);
	double start = now();

	if (depth < 1 || depth > MOST || processes < 1 || processes > 64 || count < processes)
		return 2;
	for (int process = 0; process < processes; process++) {
		cpu_set_t cpu;

		if (fork())
			continue;
		CPU_ZERO(&cpu);
		CPU_SET(process, &cpu);
		if (sched_setaffinity(0, sizeof(cpu), &cpu))
			fail("sched_setaffinity");
		read_blocks(arguments[0], depth, count / processes, 88172645463325252 + process);
		_exit(0);
	}
	for (int process = 0; process < processes; process++) {
		int status;

		wait(&status);
		failed |= status;
	}
	if (!failed)
		printf("%.1f\n", count / processes * processes / (now() - start));
	return failed != 0;
}

/* The content of a block: every word depends on its place, version and file. */
static void fill(uint64_t *words, uint64_t seed, uint64_t block, uint64_t version)
{
	uint64_t state = seed ^ block << 40 ^ version << 8 ^ 1;

	for (int i = 0; i < WORDS; i++)
		words[i] = version ? next(&state) : 0;
}

static void compare(const uint64_t *words, uint64_t seed, uint64_t block, uint64_t version)
{
	uint64_t right[WORDS];

	fill(right, seed, block, version);
	if (!memcmp(words, right, BLOCK))
		return;
	fprintf(stderr, "disk-load: block %llu is not version %llu\n", (unsigned long long)block,
		(unsigned long long)version);
	exit(1);
}

/* What a file holds. Version 0 is zeroes. */
struct versions {
	uint64_t seed, blocks, version[];
};

static void work_on(struct load *load, struct versions *file, double seconds)
{
	struct { uint64_t block; int write; } jobs[IN_FLIGHT];
	struct io_event events[MOST];
	uint64_t state = file->seed * 2 + 1;
	long written = 0, read = 0;
	double end = now() + seconds;
	int busy = 0;

	/* Slot s has the blocks s, s + IN_FLIGHT, ...: no two requests are for the same one. */
	for (int slot = 0; slot < IN_FLIGHT; slot++, busy++) {
		jobs[slot].block = slot;
		jobs[slot].write = 0;
		submit(load, slot, IOCB_CMD_PREAD, slot);
	}
	while (busy) {
		int done = completions(load, events);

		for (int i = 0; i < done; i++) {
			int slot = events[i].data;
			uint64_t block = jobs[slot].block;

			if (!jobs[slot].write)
				compare(load->buffers[slot], file->seed, block, file->version[block]);
			jobs[slot].write ? written++ : read++;
			if (now() > end) {
				busy--;
				continue;
			}
			block = next(&state) % (file->blocks / IN_FLIGHT) * IN_FLIGHT + slot;
			jobs[slot].block = block;
			jobs[slot].write = next(&state) >> 63;
			if (jobs[slot].write)
				fill(load->buffers[slot], file->seed, block, ++file->version[block]);
			submit(load, slot, jobs[slot].write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD, block);
		}
	}
	printf("%ld written, %ld read\n", written, read);
}

static char *versions_of(const char *path)
{
	char *name;

	if (asprintf(&name, "%s.versions", path) < 0)
		fail("asprintf");
	return name;
}

static int writes(char **arguments)
{
	uint64_t blocks = strtoull(arguments[1], NULL, 0) / IN_FLIGHT * IN_FLIGHT;
	size_t size = sizeof(struct versions) + blocks * sizeof(uint64_t);
	struct versions *file = calloc(1, size);
	struct load load;
	int out;

	if (!blocks || !file)
		return 2;
	file->blocks = blocks;
	file->seed = strtoull(arguments[3], NULL, 0);
	load_open(&load, arguments[0], O_RDWR | O_CREAT);
	if (posix_fallocate(load.file, 0, blocks * BLOCK))
		fail("posix_fallocate");
	work_on(&load, file, atof(arguments[2]));
	if (fsync(load.file))
		fail("fsync");
	out = open(versions_of(arguments[0]), O_WRONLY | O_CREAT | O_TRUNC, 0644);
	if (out < 0 || write(out, file, size) != (ssize_t)size || fsync(out))
		fail("its versions");
	return 0;
}

static int check(char **arguments)
{
	FILE *blocks = fopen(arguments[0], "r"), *versions = fopen(versions_of(arguments[0]), "r");
	uint64_t words[WORDS], version;
	struct versions file;
	long written = 0;

	if (!blocks || !versions || fread(&file, sizeof(file), 1, versions) != 1)
		fail(arguments[0]);
	for (uint64_t block = 0; block < file.blocks; block++) {
		if (fread(&version, sizeof(version), 1, versions) != 1 || fread(words, BLOCK, 1, blocks) != 1)
			fail(arguments[0]);
		compare(words, file.seed, block, version);
		written += version != 0;
	}
	printf("%ld of %llu blocks written, all right\n", written, (unsigned long long)file.blocks);
	return 0;
}

int main(int count, char **arguments)
{
	if (count == 6 && !strcmp(arguments[1], "reads"))
		return reads(arguments + 2);
	if (count == 6 && !strcmp(arguments[1], "writes"))
		return writes(arguments + 2);
	if (count == 3 && !strcmp(arguments[1], "check"))
		return check(arguments + 2);
	return 2;
}
