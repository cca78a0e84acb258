//! Queues and I/O threads in the report.
use paravane_vmm::{IoThreadFigures, KickPath, QueueResult, Report};
use std::collections::BTreeMap;

/// How many queues are kicked in which way, one line.
pub(crate) fn paths(queues: &[QueueResult]) -> String {
    let by = |path| queues.iter().filter(move |queue| queue.kicks_by == path);
    let mut line = format!(
        "{} kicked by ioeventfd, {} by exit",
        by(KickPath::IoEventFd).count(),
        by(KickPath::Exits).count()
    );
    let refused = names(by(KickPath::Refused));
    if !refused.is_empty() {
        line += &format!("; ioeventfd refused by the host, kicked by exit: {refused}");
    }
    line
}

/// The queues of each I/O thread, a line for each.
pub(crate) fn threads(report: &Report) -> Vec<(String, String)> {
    let line = |(number, thread)| {
        let mine = report.queues.iter().filter(|queue| queue.io_thread == number);
        let moves: u64 = mine.clone().map(|queue| queue.moves).sum();
        let moved = if moves > 0 { format!("; {moves} moves from other threads") } else { String::new() };
        let names = names(mine);
        let work = if names.is_empty() { "no queue".to_owned() } else { names };
        (format!("I/O {number}"), format!("{work}{moved}{}", polls(thread)))
    };
    report.io_threads.iter().enumerate().map(line).collect()
}

/// The queues that CPU `cpu` of the guest works on.
pub(crate) fn of_cpu(queues: &[QueueResult], cpu: u32) -> String {
    names(queues.iter().filter(|queue| queue.cpu == Some(cpu)))
}

/// Time spent polling, if any.
fn polls(&IoThreadFigures { polled_ns, fruitful_polls, fruitless_polls, .. }: &IoThreadFigures) -> String {
    if fruitful_polls + fruitless_polls == 0 {
        return String::new();
    }
    let ms = polled_ns as f64 * 1e-6;
    format!("; polled {ms:.1} ms: {fruitful_polls} polls found work, {fruitless_polls} did not")
}

/// "disk 0 queue 0, net 1 queues 0 2".
fn names<'a>(queues: impl Iterator<Item = &'a QueueResult>) -> String {
    let mut devices: BTreeMap<usize, (&str, Vec<String>)> = BTreeMap::new();
    for queue in queues {
        let (_, indices) = devices.entry(queue.device).or_insert((&queue.device_name, Vec::new()));
        indices.push(queue.queue.to_string());
    }
    let name = |(name, queues): &(&str, Vec<String>)| {
        let noun = if queues.len() == 1 { "queue" } else { "queues" };
        format!("{name} {noun} {}", queues.join(" "))
    };
    devices.values().map(name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 3] = ["disk 0", "rng", "net 0"];

    fn queue(device: usize, queue: u16, kicks_by: KickPath) -> QueueResult {
        let device_name = NAMES[device].into();
        QueueResult { device, device_name, queue, cpu: None, io_thread: 0, moves: 0, kicks_by, exit_kicks: 0 }
    }

    #[test]
    fn those_that_fell_back_are_named() {
        let all = [
            queue(0, 0, KickPath::IoEventFd),
            queue(1, 0, KickPath::Refused),
            queue(1, 2, KickPath::Refused),
            queue(2, 0, KickPath::Exits),
        ];
        assert_eq!(
            paths(&all),
            "1 kicked by ioeventfd, 1 by exit; ioeventfd refused by the host, kicked by exit: rng queues 0 2"
        );
        let thread =
            IoThreadFigures { turns: 9, polled_ns: 1_500_000, fruitful_polls: 3, fruitless_polls: 1 };
        assert_eq!(polls(&thread), "; polled 1.5 ms: 3 polls found work, 1 did not");
        assert_eq!(polls(&IoThreadFigures::default()), "");
        assert_eq!(names(all.iter()), "disk 0 queue 0, rng queues 0 2, net 0 queue 0");
        let on_cpu = |number, cpu| QueueResult { cpu: Some(cpu), ..queue(0, number, KickPath::Exits) };
        let lanes = [on_cpu(0, 0), on_cpu(1, 1), on_cpu(2, 0)];
        assert_eq!((of_cpu(&lanes, 0).as_str(), of_cpu(&lanes, 2).as_str()), ("disk 0 queues 0 2", ""));
        assert_eq!(paths(&all[..1]), "1 kicked by ioeventfd, 0 by exit");
    }
}
