//! `--net echo[,mac=..][,queues=N][,frames=N][,size=BYTES][,reply=BYTES]`.
use crate::size::Size;
use paravane_vmm::NetConfig;
use std::str::FromStr;

/// One network card as it was asked for; its address is chosen later if none is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NetArg {
    pub(crate) config: NetConfig,
    pub(crate) named: bool,
}

impl FromStr for NetArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut options = text.split(',');
        match options.next() {
            Some("echo") => {}
            other => return Err(format!("unknown network {:?}; `echo` is known", other.unwrap_or_default())),
        }
        let mut net = Self { config: NetConfig::default(), named: false };
        for option in options {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            let bad = |error: String| format!("{name}: {error}");
            match name {
                "mac" => {
                    net.config.mac =
                        mac(value).ok_or_else(|| bad("six bytes are written 52:54:00:00:00:01".into()))?;
                    net.named = true;
                }
                "queues" => net.config.queues = value.parse().map_err(|_| bad("not a number".into()))?,
                "frames" => net.config.frames = value.parse().map_err(|_| bad("not a number".into()))?,
                "size" | "reply" => {
                    let Size(size) = value.parse().map_err(bad)?;
                    let size = u32::try_from(size).map_err(|_| format!("{name}: too large"))?;
                    match name {
                        "size" => net.config.size = size,
                        _ => net.config.reply = Some(size),
                    }
                }
                _ => {
                    return Err(format!(
                        "unknown network option {name:?}; mac, queues, frames, size and reply are known"
                    ));
                }
            }
        }
        Ok(net)
    }
}

fn mac(text: &str) -> Option<[u8; 6]> {
    let mut bytes = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut bytes {
        let part = parts.next().filter(|part| part.len() == 2)?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(bytes)
}

/// The cards, with addresses of their own for those that were given none.
pub(crate) fn configs(args: &[NetArg]) -> Vec<NetConfig> {
    let mut last = 0;
    let one = |arg: &NetArg| {
        last += 1;
        let mut config = arg.config.clone();
        if !arg.named {
            config.mac[5] = last;
        }
        config
    };
    args.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_come_in_any_order() {
        let net = |text: &str| text.parse::<NetArg>().unwrap().config;
        assert_eq!(net("echo"), NetConfig::default());
        let full = net("echo,size=1k,mac=02:00:00:0a:Ff:01,frames=5,queues=2,reply=2k");
        assert_eq!(full.mac, [2, 0, 0, 10, 255, 1]);
        assert_eq!((full.queues, full.frames, full.size, full.reply()), (2, 5, 1024, 2048));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            "tap",
            "echo,",
            "echo,mac",
            "echo,mac=1:2:3:4:5:6",
            "echo,mac=02:00:00:00:00",
            "echo,mac=02:00:00:00:00:00:00",
            "echo,mac=+2:00:00:00:00:00:00",
            "echo,queues=-1",
            "echo,size=5G",
            "echo,reply=5G",
            "echo,speed=1",
        ] {
            assert!(text.parse::<NetArg>().is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn cards_without_an_address_get_different_ones() {
        let args: Vec<NetArg> =
            ["echo", "echo", "echo,mac=02:00:00:00:00:09"].iter().map(|text| text.parse().unwrap()).collect();
        let macs: Vec<u8> = configs(&args).iter().map(|config| config.mac[5]).collect();
        assert_eq!(macs, [1, 2, 9]);
    }
}
