// SPDX-License-Identifier: GPL-2.0-only
/*
 * virtio over MMIO with notification addresses and message-signalled interrupts.
 *
 * The numbers and the rules are those of docs/reference/virtio-mmio-msi.md, beside the
 * specification of virtio (1.4, section 4.2); section numbers without a name are the former's.
 * A device that does not offer the extension is left to the stock driver, virtio_mmio, as it was
 * found.
 *
 *   probe: whose device is it? --no--> -ENODEV
 *     | yes
 *     v
 *   finalize_features: accept 44, 45 and RING_RESET as far as offered
 *     v
 *   find_vqs: rings -> interrupts -> queues are made ready
 *                         |
 *                         +-- ENABLE, a message for every source --> a handler for each queue
 *                         |                        | refused, or Linux has no vectors
 *                         |                        v
 *                         +-- not accepted ---> DISABLE ---> wired interrupt, status register
 *
 * QueueSel selects for several registers, and the interrupt core asks for MSI commands at any time:
 * a caller that selects holds the device's lock until done.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/acpi.h>
#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/interrupt.h>
#include <linux/io.h>
#include <linux/irq.h>
#include <linux/irqdomain.h>
#include <linux/module.h>
#include <linux/msi.h>
#include <linux/of.h>
#include <linux/platform_device.h>
#include <linux/slab.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>
#include <uapi/linux/virtio_mmio.h>
#ifdef CONFIG_X86_LOCAL_APIC
#include <asm/irqdomain.h>
#endif

#include "compat.h"

/* Missing in <linux/virtio_mmio.h> of 6.1. */
#define MAGIC			0x74726976	/* "virt" */
#define QUEUE_RESET		0x0c0

/* Section 2. */
/* "PARA": only there the bits mean this extension. */
#define VENDOR			0x41524150
#define F_NOTIFICATION		44
#define F_MSI			45

#define NOTIFY_BASE		0x0c4
#define NOTIFY_MULTIPLIER	0x0c8
#define MSI_LIMIT		0x0d0
#define MSI_ADDRESS_LOW		0x0d4
#define MSI_ADDRESS_HIGH	0x0d8
#define MSI_DATA		0x0dc
#define MSI_COMMAND		0x0e0
#define MSI_STATE		0x0e4

#define SELECT_CONFIGURATION	0xffff
#define NOTIFY_PAGE		0x1000		/* NotifyBase is a multiple of it */

/* Section 4.3. */
enum command {
	ENABLE = 1,
	DISABLE = 2,
	CONFIGURE = 3,
	MASK = 4,
	UNMASK = 5,
	UNCONFIGURE = 6,
};

/* Section 4.4. */
#define STATE_ON		BIT(0)
#define STATE_CONFIGURED	BIT(1)
#define STATE_REFUSED		BIT(4)

/* Milliseconds after which a reset that is not over is reported. */
#define RESET_WARNING		5000
/* virtio's largest queue. */
#define QUEUE_SIZE_LIMIT	32768
/* Linux's limit for a platform device. */
#define VECTOR_LIMIT		2048

struct mmio_device;

/* A message; Linux has an interrupt for each. */
struct vector {
	struct mmio_device *vm;
	struct msi_msg msg;
	int irq;
	/* Cookie of its handler; NULL: no handler is registered. */
	void *cookie;
	bool configured;
	bool masked;
	/* The device refused the last message. */
	bool refused;
	char name[40];
};

/* A source of interrupts: a queue, or the configuration change. */
struct source {
	/* NULL: the configuration change. */
	struct virtqueue *vq;
	/* The vector whose message it sends. */
	unsigned int vector;
};

struct mmio_device {
	struct virtio_device vdev;
	struct platform_device *pdev;
	void __iomem *base;
	/* Size of the window in bytes, from firmware. */
	resource_size_t window;
	/* virtio-mmio's version: 2, or 3 with a reset that may take time. */
	u32 version;

	/* Protects QueueSel and what it selects, the vectors' messages and bits, and msi. */
	raw_spinlock_t lock;
	/* MSI is on. A reset turns it off, and then its registers are gone. */
	bool msi;

	/* From find_vqs to del_vqs. */
	struct source *sources;
	unsigned int source_count;
	struct vector *vectors;
	unsigned int vector_count;
	/* The wired interrupt is in use; 0: it is not. */
	int wire;
};

static struct mmio_device *to_mmio(struct virtio_device *vdev)
{
	return container_of(vdev, struct mmio_device, vdev);
}

static u32 reg_read(const struct mmio_device *vm, unsigned int offset)
{
	return readl(vm->base + offset);
}

static void reg_write(const struct mmio_device *vm, unsigned int offset, u32 value)
{
	writel(value, vm->base + offset);
}

/* Reads one register of queue @index. */
static u32 queue_read(struct mmio_device *vm, unsigned int index, unsigned int offset)
{
	unsigned long flags;
	u32 value;

	raw_spin_lock_irqsave(&vm->lock, flags);
	reg_write(vm, VIRTIO_MMIO_QUEUE_SEL, index);
	value = reg_read(vm, offset);
	raw_spin_unlock_irqrestore(&vm->lock, flags);
	return value;
}

/* Writes one register of queue @index. */
static void queue_write(struct mmio_device *vm, unsigned int index, unsigned int offset, u32 value)
{
	unsigned long flags;

	raw_spin_lock_irqsave(&vm->lock, flags);
	reg_write(vm, VIRTIO_MMIO_QUEUE_SEL, index);
	reg_write(vm, offset, value);
	raw_spin_unlock_irqrestore(&vm->lock, flags);
}

/* Configuration space, status, features */

static void config_get(struct virtio_device *vdev, unsigned int offset, void *buf, unsigned int len)
{
	void __iomem *at = to_mmio(vdev)->base + VIRTIO_MMIO_CONFIG + offset;
	__le32 words[2];
	__le16 half;

	/* A field is read by its own width, 64 bits as two of 32 (virtio, section 4.2.2.2). */
	switch (len) {
	case 1:
		*(u8 *)buf = readb(at);
		break;
	case 2:
		half = cpu_to_le16(readw(at));
		memcpy(buf, &half, len);
		break;
	case 4:
	case 8:
		words[0] = cpu_to_le32(readl(at));
		if (len == 8)
			words[1] = cpu_to_le32(readl(at + 4));
		memcpy(buf, words, len);
		break;
	default:
		WARN_ONCE(1, "no field has %u bytes\n", len);
		memset(buf, 0, len);
	}
}

static void config_set(struct virtio_device *vdev, unsigned int offset, const void *buf,
		       unsigned int len)
{
	void __iomem *at = to_mmio(vdev)->base + VIRTIO_MMIO_CONFIG + offset;
	__le32 words[2];
	__le16 half;

	switch (len) {
	case 1:
		writeb(*(const u8 *)buf, at);
		break;
	case 2:
		memcpy(&half, buf, len);
		writew(le16_to_cpu(half), at);
		break;
	case 4:
	case 8:
		memcpy(words, buf, len);
		writel(le32_to_cpu(words[0]), at);
		if (len == 8)
			writel(le32_to_cpu(words[1]), at + 4);
		break;
	default:
		WARN_ONCE(1, "no field has %u bytes\n", len);
	}
}

static u32 config_generation(struct virtio_device *vdev)
{
	return reg_read(to_mmio(vdev), VIRTIO_MMIO_CONFIG_GENERATION);
}

static u8 get_status(struct virtio_device *vdev)
{
	return reg_read(to_mmio(vdev), VIRTIO_MMIO_STATUS);
}

static void set_status(struct virtio_device *vdev, u8 status)
{
	/* 0 would be a reset. */
	if (!WARN_ON(!status))
		reg_write(to_mmio(vdev), VIRTIO_MMIO_STATUS, status);
}

static void reset_device(struct virtio_device *vdev)
{
	struct mmio_device *vm = to_mmio(vdev);
	unsigned int waited = 0;
	unsigned long flags;

	raw_spin_lock_irqsave(&vm->lock, flags);
	vm->msi = false;
	reg_write(vm, VIRTIO_MMIO_STATUS, 0);
	raw_spin_unlock_irqrestore(&vm->lock, flags);

	/*
	 * A device of version 3 may take its time; until it reads 0, queues and buffers are in use.
	 * With version 2 the reset is over at once, and a driver need not look.
	 */
	while (reg_read(vm, VIRTIO_MMIO_STATUS)) {
		if (waited++ == RESET_WARNING) {
			dev_warn(&vdev->dev, "the device does not finish its reset\n");
			if (vm->version < 3)
				break;
		}
		fsleep(1000);
	}
}

static u64 read_features(const struct mmio_device *vm)
{
	u64 features;

	reg_write(vm, VIRTIO_MMIO_DEVICE_FEATURES_SEL, 1);
	features = (u64)reg_read(vm, VIRTIO_MMIO_DEVICE_FEATURES) << 32;
	reg_write(vm, VIRTIO_MMIO_DEVICE_FEATURES_SEL, 0);
	return features | reg_read(vm, VIRTIO_MMIO_DEVICE_FEATURES);
}

static u64 get_features(struct virtio_device *vdev)
{
	return read_features(to_mmio(vdev));
}

static int finalize_features(struct virtio_device *vdev)
{
	struct mmio_device *vm = to_mmio(vdev);
	u64 wanted = BIT_ULL(F_MSI) | BIT_ULL(VIRTIO_F_RING_RESET);

	/* It drops the bits that the rings do not know: those of transports are for us to add. */
	vring_transport_features(vdev);
	if (!virtio_has_feature(vdev, VIRTIO_F_VERSION_1)) {
		dev_err(&vdev->dev, "a version %u device without VIRTIO_F_VERSION_1\n",
			vm->version);
		return -EINVAL;
	}
	/* Addresses beyond the window could not be used. */
	if (vm->window > NOTIFY_PAGE)
		wanted |= BIT_ULL(F_NOTIFICATION);
	vdev->features |= read_features(vm) & wanted;

	reg_write(vm, VIRTIO_MMIO_DRIVER_FEATURES_SEL, 1);
	reg_write(vm, VIRTIO_MMIO_DRIVER_FEATURES, vdev->features >> 32);
	reg_write(vm, VIRTIO_MMIO_DRIVER_FEATURES_SEL, 0);
	reg_write(vm, VIRTIO_MMIO_DRIVER_FEATURES, (u32)vdev->features);
	return 0;
}

static const char *bus_name(struct virtio_device *vdev)
{
	return to_mmio(vdev)->pdev->name;
}

static u64 reg_read_pair(const struct mmio_device *vm, unsigned int low, unsigned int high)
{
	return reg_read(vm, low) | (u64)reg_read(vm, high) << 32;
}

static bool get_shm_region(struct virtio_device *vdev, struct virtio_shm_region *region, u8 id)
{
	struct mmio_device *vm = to_mmio(vdev);

	reg_write(vm, VIRTIO_MMIO_SHM_SEL, id);
	region->len = reg_read_pair(vm, VIRTIO_MMIO_SHM_LEN_LOW, VIRTIO_MMIO_SHM_LEN_HIGH);
	/* All ones: there is none. */
	if (region->len == U64_MAX)
		return false;
	region->addr = reg_read_pair(vm, VIRTIO_MMIO_SHM_BASE_LOW, VIRTIO_MMIO_SHM_BASE_HIGH);
	return true;
}

/* MSI: sources, and the vectors whose messages they send */

static void select_source(struct mmio_device *vm, const struct source *source)
{
	reg_write(vm, VIRTIO_MMIO_QUEUE_SEL, source->vq ? source->vq->index : SELECT_CONFIGURATION);
}

/*
 * Configures @vector's message for the selected source. Returns whether the device took it. The
 * lock is held.
 */
static bool configure(struct mmio_device *vm, const struct vector *vector)
{
	reg_write(vm, MSI_ADDRESS_LOW, vector->msg.address_lo);
	reg_write(vm, MSI_ADDRESS_HIGH, vector->msg.address_hi);
	reg_write(vm, MSI_DATA, vector->msg.data);
	reg_write(vm, MSI_COMMAND, CONFIGURE);
	/* The read completes the change: after it nothing is sent to the old message (4.5). */
	return (reg_read(vm, MSI_STATE) & (STATE_CONFIGURED | STATE_REFUSED)) == STATE_CONFIGURED;
}

/* Turns MSI on or off. Returns whether the device did so. */
static bool switch_msi(struct mmio_device *vm, bool on)
{
	unsigned long flags;
	bool is_on;

	raw_spin_lock_irqsave(&vm->lock, flags);
	reg_write(vm, MSI_COMMAND, on ? ENABLE : DISABLE);
	is_on = reg_read(vm, MSI_STATE) & STATE_ON;
	vm->msi = is_on;
	raw_spin_unlock_irqrestore(&vm->lock, flags);
	return is_on == on;
}

/*
 * Sets the message of a vector. Linux calls it with interrupts off: when the interrupt is
 * requested, when it moves to another CPU, and with zeros when it is freed.
 */
static void write_message(struct msi_desc *desc, struct msi_msg *msg)
{
	struct mmio_device *vm = dev_get_drvdata(desc->dev);
	struct vector *vector = &vm->vectors[desc->msi_index];
	struct source *source;
	unsigned long flags;

	raw_spin_lock_irqsave(&vm->lock, flags);
	vector->msg = *msg;
	vector->configured = msg->address_lo || msg->address_hi || msg->data;
	/* A shared vector is moved source by source: plan_vectors() leaves a message for that. */
	for (source = vm->sources; vm->msi && source < vm->sources + vm->source_count; source++) {
		if (source->vector != desc->msi_index)
			continue;
		select_source(vm, source);
		if (!vector->configured) {
			reg_write(vm, MSI_COMMAND, UNCONFIGURE);
			reg_read(vm, MSI_STATE);
		} else if (!configure(vm, vector)) {
			/* The old message, if any, stays in force (4.6). Linux cannot be told. */
			dev_warn_ratelimited(desc->dev, "the device refuses message %u\n",
					     desc->msi_index);
			vector->refused = true;
		}
	}
	raw_spin_unlock_irqrestore(&vm->lock, flags);
}

#ifdef CONFIG_X86_LOCAL_APIC
/*
 * x86 has no interrupt domain for messages of platform devices: that of the local APICs' vectors
 * takes PCI devices only. This is one on top of it, for all devices of this driver. It only passes
 * on; what differs from one device to the next is in the domain that Linux makes for each:
 *
 *   device's domain      mask, unmask and write the message: registers of the device
 *     v
 *   own_domain           allows that
 *     v
 *   x86_vector_domain    vector and CPU; composes the message
 */
static struct irq_domain *own_domain;
static struct fwnode_handle *own_domain_node;

static void set_masked(struct irq_data *data, bool masked)
{
	struct msi_desc *desc = irq_data_get_msi_desc(data);
	struct mmio_device *vm = dev_get_drvdata(desc->dev);
	struct source *source;
	unsigned long flags;

	raw_spin_lock_irqsave(&vm->lock, flags);
	vm->vectors[desc->msi_index].masked = masked;
	for (source = vm->sources; vm->msi && source < vm->sources + vm->source_count; source++) {
		if (source->vector != desc->msi_index)
			continue;
		select_source(vm, source);
		reg_write(vm, MSI_COMMAND, masked ? MASK : UNMASK);
		/* After the read nothing is sent any more (4.5). */
		if (masked)
			reg_read(vm, MSI_STATE);
	}
	raw_spin_unlock_irqrestore(&vm->lock, flags);
}

static void mask_vector(struct irq_data *data)
{
	set_masked(data, true);
}

static void unmask_vector(struct irq_data *data)
{
	set_masked(data, false);
}

/* Completes the domain that Linux makes for the messages of @dev. */
static bool init_device_domain(struct device *dev, struct irq_domain *domain,
			       struct irq_domain *parent, struct msi_domain_info *info)
{
	/* Linux adds how a message is composed and moved, and allocates the descriptors. */
	info->flags |= MSI_FLAG_USE_DEF_DOM_OPS | MSI_FLAG_USE_DEF_CHIP_OPS |
		       MSI_FLAG_ALLOC_SIMPLE_MSI_DESCS | MSI_FLAG_FREE_MSI_DESCS;
	info->chip->name = "virtio-mmio-MSI";
	info->chip->irq_mask = mask_vector;
	info->chip->irq_unmask = unmask_vector;
	info->chip->irq_ack = irq_chip_ack_parent;
	info->chip->irq_retrigger = irq_chip_retrigger_hierarchy;
	info->chip->flags |= IRQCHIP_SKIP_SET_WAKE | IRQCHIP_AFFINITY_PRE_STARTUP;
	info->handler = handle_edge_irq;
	info->handler_name = "edge";
	return true;
}

static const struct msi_parent_ops own_domain_msi_ops = {
	.init_dev_msi_info = init_device_domain,
};

static struct irq_chip own_chip = {
	.name = "virtio-mmio",
	.irq_ack = irq_chip_ack_parent,
	.irq_set_affinity = irq_chip_set_affinity_parent,
};

static int alloc_vectors(struct irq_domain *domain, unsigned int virq, unsigned int count,
			 void *arg)
{
	unsigned int i;
	int err;

	/* @arg is from the device's domain. It asks for nothing special: any vector will do. */
	err = irq_domain_alloc_irqs_parent(domain, virq, count, arg);
	/* Messages of several devices have the same number: the interrupts' numbers differ. */
	for (i = 0; !err && i < count; i++)
		err = irq_domain_set_hwirq_and_chip(domain, virq + i, virq + i, &own_chip, NULL);
	return err;
}

static const struct irq_domain_ops own_domain_ops = {
	.alloc = alloc_vectors,
	.free = irq_domain_free_irqs_common,
};

static void make_own_domain(void)
{
	struct irq_domain_info info = {
		.ops = &own_domain_ops,
		.parent = x86_vector_domain,
	};

	if (!x86_vector_domain)
		return;
	own_domain_node = irq_domain_alloc_named_fwnode("virtio-mmio-MSI");
	info.fwnode = own_domain_node;
	if (own_domain_node)
		own_domain = msi_create_parent_irq_domain(&info, &own_domain_msi_ops);
	if (!own_domain)
		pr_warn("no interrupt domain: devices use their wires\n");
}

static void remove_own_domain(void)
{
	if (own_domain)
		irq_domain_remove(own_domain);
	if (own_domain_node)
		irq_domain_free_fwnode(own_domain_node);
}

static void use_own_domain(struct platform_device *pdev)
{
	if (!dev_get_msi_domain(&pdev->dev))
		dev_set_msi_domain(&pdev->dev, own_domain);
}

static void leave_own_domain(struct platform_device *pdev)
{
	if (dev_get_msi_domain(&pdev->dev) == own_domain)
		dev_set_msi_domain(&pdev->dev, NULL);
}
#else
/* Where firmware gives platform devices a domain (ITS and others), that one is used. */
static void make_own_domain(void) { }
static void remove_own_domain(void) { }
static void use_own_domain(struct platform_device *pdev) { }
static void leave_own_domain(struct platform_device *pdev) { }
#endif

/* Interrupts */

/* A message that several sources send. */
static irqreturn_t shared_message(int irq, void *cookie)
{
	struct vector *vector = cookie;
	struct mmio_device *vm = vector->vm;
	unsigned int number = vector - vm->vectors;
	struct source *source;

	/* The source is unknown: check all. There is no status and nothing to acknowledge (4.6). */
	for (source = vm->sources; source < vm->sources + vm->source_count; source++) {
		if (source->vector != number)
			continue;
		if (source->vq)
			vring_interrupt(irq, source->vq);
		else
			virtio_config_changed(&vm->vdev);
	}
	return IRQ_HANDLED;
}

/* The wired interrupt, as virtio's section 4.2.2 has it. */
static irqreturn_t wired(int irq, void *cookie)
{
	struct mmio_device *vm = cookie;
	struct source *source;
	u32 causes;

	causes = reg_read(vm, VIRTIO_MMIO_INTERRUPT_STATUS);
	/* Undefined bits are not acknowledged. */
	causes &= VIRTIO_MMIO_INT_VRING | VIRTIO_MMIO_INT_CONFIG;
	if (!causes)
		return IRQ_NONE;
	reg_write(vm, VIRTIO_MMIO_INTERRUPT_ACK, causes);

	for (source = vm->sources; source < vm->sources + vm->source_count; source++) {
		if (!source->vq && (causes & VIRTIO_MMIO_INT_CONFIG))
			virtio_config_changed(&vm->vdev);
		if (source->vq && (causes & VIRTIO_MMIO_INT_VRING))
			vring_interrupt(irq, source->vq);
	}
	return IRQ_HANDLED;
}

/*
 * How many messages @sources sources get. Where they must share, one is left over: while a shared
 * message moves to another CPU, its sources have the old one and the new one between them.
 */
static unsigned int plan_vectors(unsigned int sources, u32 limit)
{
	sources = min_t(unsigned int, sources, VECTOR_LIMIT);
	if (sources <= limit)
		return sources;
	return limit ? limit - 1 : 0;
}

/* The configuration change has the first vector; queues take turns with the others. */
static void share_out(struct mmio_device *vm, unsigned int vectors)
{
	unsigned int i;

	for (i = 0; i < vm->source_count; i++)
		vm->sources[i].vector = i && vectors > 1 ? 1 + (i - 1) % (vectors - 1) : 0;
}

/* The source of vector @number; NULL if several share it. */
static struct source *only_source(struct mmio_device *vm, unsigned int number)
{
	struct source *source, *only = NULL;

	for (source = vm->sources; source < vm->sources + vm->source_count; source++) {
		if (source->vector != number)
			continue;
		if (only)
			return NULL;
		only = source;
	}
	return only;
}

static void free_messages(struct mmio_device *vm)
{
	struct vector *vector;

	if (!vm->vectors)
		return;
	for (vector = vm->vectors; vector < vm->vectors + vm->vector_count; vector++)
		if (vector->cookie)
			free_irq(vector->irq, vector->cookie);
	/* What follows takes the messages from the sources, if there was no reset. */
	platform_device_msi_free_irqs_all(&vm->pdev->dev);
	kfree(vm->vectors);
	vm->vectors = NULL;
	vm->vector_count = 0;
}

/* Tries with @count messages. */
static int request_messages(struct mmio_device *vm, unsigned int count)
{
	struct device *dev = &vm->pdev->dev;
	unsigned int i;
	int err;

	vm->vectors = kcalloc(count, sizeof(*vm->vectors), GFP_KERNEL);
	if (!vm->vectors)
		return -ENOMEM;
	share_out(vm, count);
	err = platform_device_msi_init_and_alloc_irqs(dev, count, write_message);
	if (err) {
		/* The domain of a failed attempt is in the way of the next one. */
		if (dev->msi.data)
			platform_device_msi_free_irqs_all(dev);
		kfree(vm->vectors);
		vm->vectors = NULL;
		return err;
	}
	vm->vector_count = count;

	for (i = 0; i < count; i++) {
		struct vector *vector = &vm->vectors[i];
		struct source *only = only_source(vm, i);
		/* The vector of one queue calls its handler directly. */
		struct virtqueue *vq = only ? only->vq : NULL;

		vector->vm = vm;
		vector->irq = msi_get_virq(dev, i);
		compat_move_at_once(vector->irq);
		snprintf(vector->name, sizeof(vector->name), "%s-%s", dev_name(&vm->vdev.dev),
			 vq ? vq->name : only ? "config" : "shared");
		/* This gives the device the message. */
		err = request_irq(vector->irq, vq ? vring_interrupt : shared_message, 0,
				  vector->name, vq ? (void *)vq : vector);
		if (!err)
			vector->cookie = vq ? (void *)vq : vector;
		if (!err && (!vector->configured || vector->refused))
			err = -EIO;
		if (err) {
			free_messages(vm);
			return err;
		}
	}
	return 0;
}

/* Gets as many messages as possible. Without any, MSI is off. */
static int set_up_messages(struct mmio_device *vm)
{
	unsigned int count;
	int err;

	if (!switch_msi(vm, true))
		return -EIO;
	count = plan_vectors(vm->source_count, reg_read(vm, MSI_LIMIT));
	err = count ? request_messages(vm, count) : -ENOSPC;
	while (err && count > 1) {
		/* Linux or the device has too few: try with fewer. The plan fits every number. */
		count = count > 2 ? 2 : 1;
		err = request_messages(vm, count);
	}
	if (err && !switch_msi(vm, false))
		dev_err(&vm->vdev.dev, "MSI cannot be turned off\n");
	return err;
}

static int set_up_interrupts(struct mmio_device *vm)
{
	int irq, err;

	if (virtio_has_feature(&vm->vdev, F_MSI)) {
		err = set_up_messages(vm);
		if (!err)
			return 0;
		/* After DRIVER_OK it stays on, and the wired interrupt does not work. */
		if (vm->msi)
			return err;
		dev_info(&vm->vdev.dev, "no messages (%d): the wired interrupt is used\n", err);
	}
	irq = platform_get_irq(vm->pdev, 0);
	if (irq < 0)
		return irq;
	err = request_irq(irq, wired, IRQF_SHARED, dev_name(&vm->vdev.dev), vm);
	if (!err)
		vm->wire = irq;
	return err;
}

static void synchronize_cbs(struct virtio_device *vdev)
{
	struct mmio_device *vm = to_mmio(vdev);
	unsigned int i;

	for (i = 0; i < vm->vector_count; i++)
		synchronize_irq(vm->vectors[i].irq);
	if (vm->wire)
		synchronize_irq(vm->wire);
}

static int set_vq_affinity(struct virtqueue *vq, const struct cpumask *cpus)
{
	struct mmio_device *vm = to_mmio(vq->vdev);
	unsigned int i;

	for (i = 0; i < vm->vector_count; i++) {
		/* Other sources would move with it. */
		if (vm->vectors[i].cookie == vq)
			return cpus ? irq_set_affinity(vm->vectors[i].irq, cpus) : 0;
	}
	return -EINVAL;
}

/* Queues */

static bool notify(struct virtqueue *vq)
{
	/* The address says which queue (section 3.1), and on QueueNotify the value does. */
	writel(vq->index, (void __iomem *)vq->priv);
	return true;
}

static bool notify_with_data(struct virtqueue *vq)
{
	writel(vring_notification_data(vq), (void __iomem *)vq->priv);
	return true;
}

/* Where queue @index is notified. The device must not make Linux write beyond its window. */
static void __iomem *notification_address(struct mmio_device *vm, unsigned int index)
{
	u64 base, multiplier, offset;

	if (!virtio_has_feature(&vm->vdev, F_NOTIFICATION))
		return vm->base + VIRTIO_MMIO_QUEUE_NOTIFY;
	base = reg_read(vm, NOTIFY_BASE);
	multiplier = reg_read(vm, NOTIFY_MULTIPLIER);
	offset = base + index * multiplier;
	if (base && base % NOTIFY_PAGE == 0 && multiplier && multiplier % 4 == 0 &&
	    offset + 4 <= vm->window)
		return vm->base + offset;
	dev_warn(&vm->vdev.dev, "wrong notification address for queue %u: using QueueNotify\n",
		 index);
	return vm->base + VIRTIO_MMIO_QUEUE_NOTIFY;
}

static struct virtqueue *make_queue(struct mmio_device *vm, unsigned int index,
				    const struct virtqueue_info *info)
{
	bool with_data = virtio_has_feature(&vm->vdev, VIRTIO_F_NOTIFICATION_DATA);
	struct virtqueue *vq;
	u32 size;

	if (queue_read(vm, index, VIRTIO_MMIO_QUEUE_READY))
		return ERR_PTR(-EBUSY);
	size = queue_read(vm, index, VIRTIO_MMIO_QUEUE_NUM_MAX);
	if (!size || size > QUEUE_SIZE_LIMIT)
		return ERR_PTR(-ENOENT);
	vq = vring_create_virtqueue(index, size, PAGE_SIZE, &vm->vdev, true, true, info->ctx,
				    with_data ? notify_with_data : notify, info->callback,
				    info->name);
	if (!vq)
		return ERR_PTR(-ENOMEM);
	vq->num_max = size;
	vq->priv = (void __force *)notification_address(vm, index);
	return vq;
}

static void make_ready(struct mmio_device *vm, struct virtqueue *vq)
{
	/* The register for the high 32 bits of each address is the next one. */
	const struct {
		unsigned int low;
		u64 address;
	} areas[] = {
		{ VIRTIO_MMIO_QUEUE_DESC_LOW, virtqueue_get_desc_addr(vq) },
		{ VIRTIO_MMIO_QUEUE_AVAIL_LOW, virtqueue_get_avail_addr(vq) },
		{ VIRTIO_MMIO_QUEUE_USED_LOW, virtqueue_get_used_addr(vq) },
	};
	unsigned long flags;
	unsigned int i;

	raw_spin_lock_irqsave(&vm->lock, flags);
	reg_write(vm, VIRTIO_MMIO_QUEUE_SEL, vq->index);
	reg_write(vm, VIRTIO_MMIO_QUEUE_NUM, virtqueue_get_vring_size(vq));
	for (i = 0; i < ARRAY_SIZE(areas); i++) {
		reg_write(vm, areas[i].low, lower_32_bits(areas[i].address));
		reg_write(vm, areas[i].low + 4, upper_32_bits(areas[i].address));
	}
	/* Writes to the device are in order with those to memory that come before. */
	reg_write(vm, VIRTIO_MMIO_QUEUE_READY, 1);
	raw_spin_unlock_irqrestore(&vm->lock, flags);
}

static void delete_queue(struct mmio_device *vm, struct virtqueue *vq)
{
	/* Usually the device has been reset, and there is nothing to stop. */
	if (queue_read(vm, vq->index, VIRTIO_MMIO_QUEUE_READY)) {
		queue_write(vm, vq->index, VIRTIO_MMIO_QUEUE_READY, 0);
		/* The device must be done with the rings before they are freed. */
		WARN_ON(queue_read(vm, vq->index, VIRTIO_MMIO_QUEUE_READY));
	}
	vring_del_virtqueue(vq);
}

static void del_vqs(struct virtio_device *vdev)
{
	struct mmio_device *vm = to_mmio(vdev);
	struct virtqueue *vq, *next;

	/* No handler runs from here on. */
	free_messages(vm);
	if (vm->wire)
		free_irq(vm->wire, vm);
	vm->wire = 0;
	list_for_each_entry_safe(vq, next, &vdev->vqs, list)
		delete_queue(vm, vq);
	kfree(vm->sources);
	vm->sources = NULL;
	vm->source_count = 0;
}

static int find_vqs(struct virtio_device *vdev, unsigned int count, struct virtqueue *vqs[],
		    struct virtqueue_info infos[], struct irq_affinity *desc)
{
	struct mmio_device *vm = to_mmio(vdev);
	unsigned int i, index = 0;
	int err = 0;

	vm->sources = kcalloc(count + 1, sizeof(*vm->sources), GFP_KERNEL);
	if (!vm->sources)
		return -ENOMEM;
	/* The first, all zeros, is the configuration change. */
	vm->source_count = 1;
	for (i = 0; i < count; i++) {
		vqs[i] = NULL;
		if (!infos[i].name)
			continue;
		vqs[i] = make_queue(vm, index++, &infos[i]);
		if (IS_ERR(vqs[i])) {
			err = PTR_ERR(vqs[i]);
			break;
		}
		/* No callback, no interrupt: a source without a message sends none. */
		if (infos[i].callback)
			vm->sources[vm->source_count++].vq = vqs[i];
	}
	if (!err)
		err = set_up_interrupts(vm);
	if (err) {
		del_vqs(vdev);
		return err;
	}
	for (i = 0; i < count; i++)
		if (vqs[i])
			make_ready(vm, vqs[i]);
	return 0;
}

/* Queue reset: the rings change, the interrupt stays with Linux. */

static struct source *source_of(struct mmio_device *vm, const struct virtqueue *vq)
{
	struct source *source;

	for (source = vm->sources; source < vm->sources + vm->source_count; source++)
		if (source->vq == vq)
			return source;
	return NULL;
}

static int disable_vq_and_reset(struct virtqueue *vq)
{
	struct mmio_device *vm = to_mmio(vq->vdev);
	unsigned int waited = 0;

	if (!virtio_has_feature(vq->vdev, VIRTIO_F_RING_RESET))
		return -ENOENT;
	queue_write(vm, vq->index, QUEUE_RESET, 1);
	while (queue_read(vm, vq->index, QUEUE_RESET)) {
		if (waited++ == RESET_WARNING) {
			dev_err(&vq->vdev->dev, "the device does not finish the reset of queue %u\n",
				vq->index);
			return -ETIMEDOUT;
		}
		usleep_range(1000, 2000);
	}
#ifdef CONFIG_VIRTIO_HARDEN_NOTIFICATION
	__virtqueue_break(vq);
#endif
	/* The device sends nothing more for it; a handler may still be at work. */
	synchronize_cbs(vq->vdev);
	vq->reset = true;
	return 0;
}

static int enable_vq_after_reset(struct virtqueue *vq)
{
	struct mmio_device *vm = to_mmio(vq->vdev);
	struct source *source = source_of(vm, vq);
	bool refused = false;
	unsigned long flags;

	if (!vq->reset || queue_read(vm, vq->index, VIRTIO_MMIO_QUEUE_READY))
		return -EBUSY;

	/* The reset has taken its message and its mask (4.5). */
	raw_spin_lock_irqsave(&vm->lock, flags);
	if (vm->msi && source) {
		const struct vector *vector = &vm->vectors[source->vector];

		select_source(vm, source);
		if (vector->masked)
			reg_write(vm, MSI_COMMAND, MASK);
		refused = vector->configured && !configure(vm, vector);
	}
	raw_spin_unlock_irqrestore(&vm->lock, flags);
	if (refused)
		return -EIO;

#ifdef CONFIG_VIRTIO_HARDEN_NOTIFICATION
	__virtqueue_unbreak(vq);
#endif
	make_ready(vm, vq);
	vq->reset = false;
	return 0;
}

static const struct virtio_config_ops config_ops = {
	.get = config_get,
	.set = config_set,
	.generation = config_generation,
	.get_status = get_status,
	.set_status = set_status,
	.reset = reset_device,
	.find_vqs = COMPAT_FIND_VQS,
	.del_vqs = del_vqs,
	.synchronize_cbs = synchronize_cbs,
	.get_features = get_features,
	.finalize_features = finalize_features,
	.bus_name = bus_name,
	.set_vq_affinity = set_vq_affinity,
	.get_shm_region = get_shm_region,
	.disable_vq_and_reset = disable_vq_and_reset,
	.enable_vq_after_reset = enable_vq_after_reset,
};

/* Platform device */

/*
 * Whether the device is for this driver. Changes nothing but DeviceFeaturesSel, and that on our own
 * devices only.
 */
static bool offers_extension(struct mmio_device *vm)
{
	/* Wrong magic or version: no other register may be touched (virtio, section 4.2.3.1.1). */
	if (reg_read(vm, VIRTIO_MMIO_MAGIC_VALUE) != MAGIC)
		return false;
	vm->version = reg_read(vm, VIRTIO_MMIO_VERSION);
	if (vm->version != 2 && vm->version != 3)
		return false;
	if (!reg_read(vm, VIRTIO_MMIO_DEVICE_ID) || reg_read(vm, VIRTIO_MMIO_VENDOR_ID) != VENDOR)
		return false;
	return read_features(vm) & (BIT_ULL(F_NOTIFICATION) | BIT_ULL(F_MSI));
}

static void release_device(struct device *dev)
{
	kfree(to_mmio(dev_to_virtio(dev)));
}

static int probe(struct platform_device *pdev)
{
	struct mmio_device *vm;
	struct resource *window;
	int err;

	vm = kzalloc_obj(*vm);
	if (!vm)
		return -ENOMEM;
	raw_spin_lock_init(&vm->lock);
	vm->pdev = pdev;
	vm->vdev.dev.parent = &pdev->dev;
	vm->vdev.dev.release = release_device;
	vm->vdev.config = &config_ops;

	vm->base = devm_platform_get_and_ioremap_resource(pdev, 0, &window);
	if (IS_ERR(vm->base)) {
		err = PTR_ERR(vm->base);
		goto free;
	}
	vm->window = resource_size(window);
	if (vm->window < VIRTIO_MMIO_CONFIG || !offers_extension(vm)) {
		/* Linux gives back what it has mapped, and asks the next driver. */
		err = -ENODEV;
		goto free;
	}
	vm->vdev.id.device = reg_read(vm, VIRTIO_MMIO_DEVICE_ID);
	vm->vdev.id.vendor = VENDOR;

	err = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(64));
	if (err)
		goto free;
	use_own_domain(pdev);
	platform_set_drvdata(pdev, vm);
	err = register_virtio_device(&vm->vdev);
	if (err) {
		leave_own_domain(pdev);
		/* It frees vm. */
		put_device(&vm->vdev.dev);
	}
	return err;

free:
	kfree(vm);
	return err;
}

static void remove(struct platform_device *pdev)
{
	struct mmio_device *vm = platform_get_drvdata(pdev);

	/* The device's driver goes, and with it its queues and interrupts. */
	unregister_virtio_device(&vm->vdev);
	leave_own_domain(pdev);
}

/* The virtio core resets the device and negotiates again; its driver finds its queues again. */
static int freeze(struct device *dev)
{
	struct mmio_device *vm = dev_get_drvdata(dev);

	return virtio_device_freeze(&vm->vdev);
}

static int restore(struct device *dev)
{
	struct mmio_device *vm = dev_get_drvdata(dev);

	return virtio_device_restore(&vm->vdev);
}

static DEFINE_SIMPLE_DEV_PM_OPS(pm_ops, freeze, restore);

/*
 * The same devices as the stock driver's: by device tree, ACPI, and name (board files,
 * virtio_mmio.device=).
 */
static const struct of_device_id of_ids[] = {
	{ .compatible = "virtio,mmio" },
	{ }
};
MODULE_DEVICE_TABLE(of, of_ids);

static const struct acpi_device_id acpi_ids[] = {
	{ "LNRO0005" },
	{ }
};
MODULE_DEVICE_TABLE(acpi, acpi_ids);

static const struct platform_device_id platform_ids[] = {
	{ "virtio-mmio" },
	{ }
};
MODULE_DEVICE_TABLE(platform, platform_ids);

static struct platform_driver driver = {
	.probe = probe,
	.remove = COMPAT_REMOVE,
	.id_table = platform_ids,
	.driver = {
		.name = "virtio-mmio-msi",
		.of_match_table = of_match_ptr(of_ids),
		.acpi_match_table = ACPI_PTR(acpi_ids),
		.pm = pm_sleep_ptr(&pm_ops),
	},
};

static int __init start(void)
{
	int err;

	make_own_domain();
	err = platform_driver_register(&driver);
	if (err)
		remove_own_domain();
	return err;
}
module_init(start);

static void __exit stop(void)
{
	platform_driver_unregister(&driver);
	remove_own_domain();
}
module_exit(stop);

/* Devices that it refuses are for the stock driver. README.md: how to load this one first. */
MODULE_SOFTDEP("post: virtio_mmio");
MODULE_DESCRIPTION("virtio over MMIO with notification addresses and message-signalled interrupts");
MODULE_AUTHOR("The Paravane maintainers");
MODULE_LICENSE("GPL");
