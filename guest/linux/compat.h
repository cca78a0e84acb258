/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What Linux 7.3 has and older kernels do not. virtio_mmio_msi.c is written for Linux 7.3, for which
 * this file only defines names.
 */
#ifndef VIRTIO_MMIO_MSI_COMPAT_H
#define VIRTIO_MMIO_MSI_COMPAT_H

#include <linux/err.h>
#include <linux/irq.h>
#include <linux/irqdomain.h>
#include <linux/msi.h>
#include <linux/platform_device.h>
#include <linux/slab.h>
#include <linux/version.h>
#include <linux/virtio_config.h>
#include <linux/virtio_ring.h>

#if KERNEL_VERSION(6, 2, 0) <= LINUX_VERSION_CODE && LINUX_VERSION_CODE < KERNEL_VERSION(6, 12, 0)
#error "for Linux 6.1 and for Linux 6.12 and later"
#endif

#ifndef CONFIG_GENERIC_MSI_IRQ
#error "for kernels with CONFIG_GENERIC_MSI_IRQ, which CONFIG_PCI_MSI selects"
#endif

#ifndef kzalloc_obj
#define kzalloc_obj(object) kcalloc(1, sizeof(object), GFP_KERNEL)
#endif

/*
 * Lets an interrupt move to another CPU when Linux is told to, not when it comes the next time.
 * Newer kernels do so unless the chip has IRQCHIP_MOVE_DEFERRED.
 */
static inline void compat_move_at_once(unsigned int irq)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 15, 0)
	irq_set_status_flags(irq, IRQ_MOVE_PCNTXT);
#endif
}

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 12, 0)

/* Functions of the driver with other parameters or results on Linux 6.1. */
#define COMPAT_FIND_VQS find_vqs
#define COMPAT_REMOVE remove

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 16, 0)
static inline struct irq_domain *
msi_create_parent_irq_domain(struct irq_domain_info *info, const struct msi_parent_ops *ops)
{
	struct irq_domain *domain;

	info->domain_flags |= IRQ_DOMAIN_FLAG_MSI_PARENT;
	domain = irq_domain_instantiate(info);
	if (IS_ERR(domain))
		return NULL;
	domain->msi_parent_ops = ops;
	return domain;
}
#endif

#else /* Linux 6.1 */

struct virtqueue_info {
	const char *name;
	vq_callback_t *callback;
	bool ctx;
};

#define COMPAT_FIND_VQS compat_find_vqs
#define COMPAT_REMOVE compat_remove

static int find_vqs(struct virtio_device *vdev, unsigned int count, struct virtqueue *vqs[],
		    struct virtqueue_info infos[], struct irq_affinity *desc);
static void remove(struct platform_device *pdev);

static inline int compat_find_vqs(struct virtio_device *vdev, unsigned int count,
				  struct virtqueue *vqs[], vq_callback_t *callbacks[],
				  const char * const names[], const bool *ctx,
				  struct irq_affinity *desc)
{
	struct virtqueue_info *infos;
	unsigned int i;
	int err;

	infos = kcalloc(count, sizeof(*infos), GFP_KERNEL);
	if (!infos)
		return -ENOMEM;
	for (i = 0; i < count; i++) {
		infos[i].name = names[i];
		infos[i].callback = callbacks[i];
		infos[i].ctx = ctx && ctx[i];
	}
	err = find_vqs(vdev, count, vqs, infos, desc);
	kfree(infos);
	return err;
}

static inline int compat_remove(struct platform_device *pdev)
{
	remove(pdev);
	return 0;
}

/* Its rings do not know this feature. */
#define VIRTIO_F_NOTIFICATION_DATA 38

static inline u32 vring_notification_data(struct virtqueue *vq)
{
	return vq->index;
}

/*
 * One domain has the messages of all devices. It is what each device's own domain is in newer
 * kernels, and lies on the vectors' domain without one in between.
 */
struct irq_domain_info {
	struct fwnode_handle *fwnode;
	const struct irq_domain_ops *ops;
	struct irq_domain *parent;
};

struct msi_parent_ops {
	bool (*init_dev_msi_info)(struct device *dev, struct irq_domain *domain,
				  struct irq_domain *parent, struct msi_domain_info *info);
};

/* Linux's default on x86 would give all messages the number 0. */
static inline void compat_number_message(msi_alloc_info_t *arg, struct msi_desc *desc)
{
	static atomic_long_t last;

	arg->desc = desc;
	arg->hwirq = atomic_long_inc_return(&last);
}

static inline struct irq_domain *
msi_create_parent_irq_domain(struct irq_domain_info *info, const struct msi_parent_ops *ops)
{
	static struct irq_chip chip;
	static struct msi_domain_ops domain_ops = { .set_desc = compat_number_message };
	static struct msi_domain_info domain_info = {
		.ops = &domain_ops,
		.chip = &chip,
	};

	if (!ops->init_dev_msi_info(NULL, NULL, info->parent, &domain_info))
		return NULL;
	return platform_msi_create_irq_domain(info->fwnode, &domain_info, info->parent);
}

static inline int platform_device_msi_init_and_alloc_irqs(struct device *dev, unsigned int count,
							  irq_write_msi_msg_t write)
{
	return platform_msi_domain_alloc_irqs(dev, count, write);
}

static inline void platform_device_msi_free_irqs_all(struct device *dev)
{
	/* A failed attempt leaves nothing to free. */
	if (dev->msi.data->platform_data)
		platform_msi_domain_free_irqs(dev);
}

#endif
#endif
