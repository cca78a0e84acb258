# Makes the tables of scripts/linux-guest tables from boots.csv and rounds.csv: medians of the rounds, and of the ratios
# within each round.
#
#   awk -v command=TEXT -v load=TEXT -v programs=TEXT -f tables.awk boots.csv rounds.csv
BEGIN {
    FS = ","
    loads = "rr rr2 from-guest to-guest read1 read32"
    named["rr"] = "TCP_RR 32/1024"
    named["rr2"] = "TCP_RR 32/1024, two connections"
    named["from-guest"] = "TCP_STREAM, guest to host"
    named["to-guest"] = "TCP_STREAM, host to guest"
    named["read1"] = "random reads, depth 1"
    named["read32"] = "random reads, depth 32"
    # What the built-in guest and the series of 2019 have: mmio-msi to mmio, to pci.
    others["rr"] = "1.92, 1.00 | 1.35, 0.98"
    others["read1"] = "1.90, 1.00 |"
    others["read32"] = "1.54, 1.01 |"
    # What the series of 2010 published for the nearest case: ioeventfd, vhost-net, to unmodified.
    published["rr"] = "0.99, 2.86 (1 byte)"
    published["from-guest"] = "1.87, 2.76 (16 KiB)"
    published["to-guest"] = "1.02, 1.93 (16 KiB)"
    published["read1"] = "1.09 (1 thread)"
    published["read32"] = "1.10 (16 threads)"
}

FNR == 1 { file++; for (i = 1; i <= NF; i++) title[i] = $i; next }
$1 > rounds { rounds = $1 }
file == 1 { boot["ms", $2, $1] = $3; boot["exits", $2, $1] = $4; booted[$2] = 1; next }
NF == 10 {
    for (i = 6; i <= NF; i++) value[title[i], $2 "/" $3, $4, $5, $1] = $i
    measured[$2 "/" $3] = 1
    with_load[$5] = 1
}

# Sets low and high, too.
function median(list,    values, n, i, j, other) {
    n = split(list, values, " ")
    if (!n) return ""
    for (i = 2; i <= n; i++)
        for (j = i; j > 1 && values[j] + 0 < values[j - 1] + 0; j--) {
            other = values[j]; values[j] = values[j - 1]; values[j - 1] = other
        }
    low = values[1]
    high = values[n]
    return n % 2 ? values[(n + 1) / 2] : (values[n / 2] + values[n / 2 + 1]) / 2
}

function of(metric, machine, placement, load, form,    list, round, key) {
    for (round = 1; round <= rounds; round++) {
        key = metric SUBSEP machine SUBSEP placement SUBSEP load SUBSEP round
        if (key in value) list = list " " value[key]
    }
    return list == "" ? "" : sprintf(form, median(list))
}

# Median of the ratios within each round, with the smallest and the largest.
function ratio(metric, machine, base, placement, load, wide,    list, round, one, other) {
    for (round = 1; round <= rounds; round++) {
        one = metric SUBSEP machine SUBSEP placement SUBSEP load SUBSEP round
        other = metric SUBSEP base SUBSEP placement SUBSEP load SUBSEP round
        if (one in value && other in value && value[other] > 0) list = list " " value[one] / value[other]
    }
    if (list == "") return ""
    return wide ? spread("%.2f", list) : sprintf("%.2f", median(list))
}

function spread(form, list,    middle) {
    if (list == "") return ""
    middle = median(list)
    return sprintf(form " (" form "–" form ")", middle, low, high)
}

function all_of(metric, machines, placement, load, form,    names, n, i, text) {
    n = split(machines, names, " ")
    for (i = 1; i <= n; i++) text = text (i > 1 ? " / " : "") of(metric, names[i], placement, load, form)
    return text
}

# A section appears with its first row.
function section(title, text, columns) {
    pending = "\n## " title "\n\n" (text == "" ? "" : text "\n\n") columns "\n"
    gsub(/[^|\n]+/, "---", columns)
    pending = pending columns
}

function row(text) {
    if (pending != "") print pending
    pending = ""
    print text
}

function transports(    n, names, i, p, place, machines, load) {
    machines = "mmio-1/user mmio-msi-1/user pci-1/user"
    section("Transports, one CPU and one queue", \
        "Beside it the ratios of rates of the [built-in guest](../bench.md#transport), measured on another machine, and those that the\n" \
        "[series of 2019](../bench.md#published-figures) published: mmio-msi to mmio, to pci.", \
        "| load | threads | rate, mmio-msi to mmio | to pci | CPU time, to mmio | to pci | rates, mmio / mmio-msi / pci | exits to user space | KVM exits | interrupts | built-in guest | series of 2019 |")
    n = split(loads, names, " ")
    for (p = 1; p <= 2; p++) for (i = 1; i <= n; i++) {
        load = names[i]
        place = p == 1 ? "colocated" : "apart"
        if (load == "rr2" || !(load in with_load)) continue
        row("| " named[load] " | " place " | " ratio("rate", "mmio-msi-1/user", "mmio-1/user", place, load, 1) \
            " | " ratio("rate", "mmio-msi-1/user", "pci-1/user", place, load, 1) \
            " | " ratio("cpu_us", "mmio-msi-1/user", "mmio-1/user", place, load) \
            " | " ratio("cpu_us", "mmio-msi-1/user", "pci-1/user", place, load) \
            " | " all_of("rate", machines, place, load, "%.0f") \
            " | " all_of("user_exits", machines, place, load, "%.2f") \
            " | " all_of("exits", machines, place, load, "%.1f") \
            " | " all_of("interrupts", machines, place, load, "%.2f") \
            " | " (load in others ? others[load] : "|") " |")
    }
}

function processors(    n, names, i, t, p, place, load, list, one, two) {
    section("Two CPUs and two queues, to one CPU and one queue", "", \
        "| load | transport | threads | rate | CPU time | exits to user space, 1 / 2 | KVM exits, 1 / 2 | interrupts, 1 / 2 |")
    n = split(loads, names, " ")
    split("mmio mmio-msi pci", list, " ")
    for (i = 1; i <= n; i++) for (t = 1; t <= 3; t++) for (p = 1; p <= 2; p++) {
        load = names[i]
        place = p == 1 ? "colocated" : "apart"
        one = list[t] "-1/user"
        two = list[t] "-2/user"
        if (ratio("rate", two, one, place, load) == "") continue
        row("| " named[load] " | " list[t] " | " place " | " ratio("rate", two, one, place, load, 1) \
            " | " ratio("cpu_us", two, one, place, load) \
            " | " all_of("user_exits", one " " two, place, load, "%.2f") \
            " | " all_of("exits", one " " two, place, load, "%.1f") \
            " | " all_of("interrupts", one " " two, place, load, "%.2f") " |")
    }
}

function kicks(    n, names, i, t, p, place, load, base, user, vhost, list) {
    section("Kicks: exits, ioeventfds, vhost-net", \
        "Rates to that of a machine whose kicks exit, and signal the I/O thread then. Beside it what the [series of\n" \
        "2010](../bench.md#published-figures) published of QEMU and virtio-pci, where the vCPU's thread does the device's work at an\n" \
        "exit. [notify](../bench.md#notify) has the same table with the built-in guest.", \
        "| load | transport | threads | ioeventfd | vhost-net | CPU time, ioeventfd | vhost-net | exits to user space, exits / ioeventfd / vhost-net | series of 2010: ioeventfd, vhost-net |")
    n = split(loads, names, " ")
    split("pci mmio", list, " ")
    for (i = 1; i <= n; i++) for (t = 1; t <= 2; t++) for (p = 1; p <= 2; p++) {
        load = names[i]
        place = p == 1 ? "colocated" : "apart"
        base = list[t] "-exits/user"
        user = list[t] "-1/user"
        vhost = list[t] "-1/vhost"
        if (ratio("rate", user, base, place, load) == "") continue
        row("| " named[load] " | " list[t] " | " place " | " ratio("rate", user, base, place, load, 1) \
            " | " ratio("rate", vhost, base, place, load, 1) \
            " | " ratio("cpu_us", user, base, place, load) " | " ratio("cpu_us", vhost, base, place, load) \
            " | " all_of("user_exits", base " " user " " vhost, place, load, "%.2f") \
            " | " (t == 1 ? published[load] : "") " |")
    }
}

function handed_over(    i, t, p, place, list, pairs) {
    section("vhost-net, to Paravane's own I/O threads", \
        "The same guest, with a card each. One CPU and one queue; two connections: two CPUs and two queues.", \
        "| load | transport | threads | rate | CPU time |")
    split("mmio mmio-msi pci", list, " ")
    split("rr-1 from-guest-1 to-guest-1 rr2-2", pairs, " ")
    for (i = 1; i <= 4; i++) for (t = 1; t <= 3; t++) for (p = 1; p <= 2; p++) {
        place = p == 1 ? "colocated" : "apart"
        load = substr(pairs[i], 1, length(pairs[i]) - 2)
        machine = list[t] substr(pairs[i], length(pairs[i]) - 1)
        if (ratio("rate", machine "/vhost", machine "/user", place, load) == "") continue
        row("| " named[load] " | " list[t] " | " place \
            " | " ratio("rate", machine "/vhost", machine "/user", place, load, 1) \
            " | " ratio("cpu_us", machine "/vhost", machine "/user", place, load) " |")
    }
}

function other_programs(    n, names, i, k, p, place, load, list, base, theirs, pair) {
    n = split(loads, names, " ")
    section("Other programs", "Paravane's rate to theirs, on the same transport; one CPU and one queue.", \
        "| load | program | threads | rate, ours to theirs | CPU time | exits to user space, ours / theirs | KVM exits |")
    split("firecracker:mmio firecracker-pci:pci kvmtool:pci microvm:mmio", list, " ")
    for (k = 1; k <= 4; k++) {
        split(list[k], pair, ":")
        theirs = pair[1] "/user"
        base = pair[2] "-1/user"
        if (!(theirs in measured)) continue
        for (i = 1; i <= n; i++) for (p = 1; p <= 2; p++) {
            load = names[i]
            place = p == 1 ? "colocated" : "apart"
            if (ratio("rate", base, theirs, place, load) == "") continue
            row("| " named[load] " | " pair[1] " (" pair[2] ") | " place " | " ratio("rate", base, theirs, place, load, 1) \
                " | " ratio("cpu_us", base, theirs, place, load) \
                " | " all_of("user_exits", base " " theirs, place, load, "%.2f") \
                " | " all_of("exits", base " " theirs, place, load, "%.1f") " |")
        }
    }
}

function boots(    n, names, i, r, list, exits, ratios, base) {
    section("Boot", "From the start of the program to the guest's init, one CPU; a disk and a card. KVM exits until then.", \
        "| machine | ms | KVM exits | time, to firecracker on the same transport |")
    n = split("mmio-1 mmio-msi-1 pci-1 firecracker firecracker-pci kvmtool microvm", names, " ")
    for (i = 1; i <= n; i++) {
        if (!(names[i] in booted)) continue
        list = exits = ratios = ""
        base = names[i] ~ /pci|kvmtool/ ? "firecracker-pci" : "firecracker"
        for (r = 1; r <= rounds; r++) {
            if (!(("ms", names[i], r) in boot)) continue
            list = list " " boot["ms", names[i], r]
            exits = exits " " boot["exits", names[i], r]
            if (("ms", base, r) in boot) ratios = ratios " " boot["ms", names[i], r] / boot["ms", base, r]
        }
        list = spread("%.0f", list)
        exits = spread("%.0f", exits)
        row("| " names[i] " | " list " | " exits " | " spread("%.2f", ratios) " |")
    }
}

END {
    print "# Linux guests\n"
    print "Made by `" command "`: medians of " rounds " rounds, at a load of " load " on two processors."
    print programs
    print "Figures in parentheses are the smallest and the largest of the rounds. [How it is measured](../bench.md#linux-guests)\n"
    print "Exits, interrupts and CPU time are for each transaction, Mbit or read; rates a second."
    transports()
    processors()
    kicks()
    handed_over()
    other_programs()
    boots()
}
