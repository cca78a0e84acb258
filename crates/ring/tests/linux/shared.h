/* What the two programs share: memory that the test maps too, and commands on a pipe. */
#ifndef PARAVANE_SHARED_H
#define PARAVANE_SHARED_H
#include <stddef.h>
#include <stdint.h>

/* Makes the memory and tells the test of it: "memory FD ADDRESS SIZE HEAP WAKE WOKEN". An address in it means the same
 * byte to Linux's code and, less ADDRESS, to the test. The first HEAP bytes are Linux's, the rest the test's.
 * WAKE is a pipe that the test reads, WOKEN one that it writes: notifications, while both sides run. */
void shared_init(void);

/* Zeroed memory out of the heap, for what Linux's driver shares with a device; page-aligned from a page on. */
void *shared_malloc(size_t size);
/* Fills it with 0xdd, so that a device that reads it late is found out. */
void shared_free(void *memory);

/* The memory at an address of the test's, or the program ends: the test is at fault. */
unsigned char *shared_at(uint64_t address, uint64_t len);

/* Notifies the test. */
void shared_wake(void);
/* Sleeps until the test notifies; the program fails after 20 seconds, since a notification is lost. */
void shared_sleep(void);

/* Reads commands, a line each, and hands them to `command` until the pipe ends. */
void shared_serve(void (*command)(const char *name));
/* The next number of the present command's line. */
uint64_t shared_number(void);
/* Adds to the answer. */
void shared_answer(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The bytes of a pattern, and a sum over bytes that were read. */
unsigned char shared_pattern(uint64_t seed, uint64_t position);
uint64_t shared_sum(uint64_t sum, const unsigned char *bytes, size_t len);
#define SHARED_SUM_START 0xcbf29ce484222325ull

#endif
